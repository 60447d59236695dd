"""``[agents]``: an agent in place of prompts, environment and rewards."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from annotated_types import Ge, Le

from oppo.config.sections import (
    ROWS,
    VERIFIERS,
    DataSection,
    EnvironmentSection,
    Prompts,
    PromptSource,
    named,
    placed,
    sources,
)
from oppo.declared import Filled, OneOf, Positive, changed, setting
from oppo.user_code import SPEC

_URL: Final = re.compile(r"^$|^https?://[^\s/]+(/\S*)?\Z")

_PROGRAM: Final = re.compile(f"^$|^{VERIFIERS}$|{SPEC.pattern}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsSection:
    """``[agents]``: an agent whose conversations are the prompts, the responses and the rewards of the run."""

    program: Annotated[str, OneOf((), f"file.py:function or {VERIFIERS}", _PROGRAM)] = setting(
        "",
        "`file.py:function` that is an agent: called with a row, the URL of an OpenAI-compatible server and a key, it "
        "returns the reward of its conversation; `verifiers`: runs the tasks of the tasksets that are the prompts; "
        "empty: none",
    )
    on_failure: Literal["fail", "drop"] = setting(
        "fail",
        "if an agent raises, hangs or asks for nothing: stop the run, or drop the rollout, or the row before its first "
        "request",
    )
    timeout: Positive | None = setting(
        None,
        "seconds in which an agent asks for something or returns, after its start or an answer; absent: no limit",
        resume="free",
    )
    host: Filled = setting(
        "127.0.0.1", "where the server listens; agents of other machines need another address", resume="free"
    )
    port: Annotated[int, Ge(0), Le(65535)] = setting(0, "of the server; 0: any that is free", resume="free")
    public_url: Annotated[str, OneOf((), "a URL such as http://machine:8000/v1", _URL)] = setting(
        "",
        "the URL that agents get, such as `http://machine:8000/v1`, where they reach the server by another "
        "address than `host`: from other machines, with a `host` of all addresses (`0.0.0.0`, `::`); empty: of "
        "`host`",
        resume="free",
    )

    @property
    def files(self) -> dict[str, Path]:
        return {"agents.program": Path(self.program.rpartition(":")[0])} if SPEC.match(self.program) else {}

    def within(self, folder: Path) -> AgentsSection:
        return replace(self, program=placed(self.program, folder))

    def check(self, environment: EnvironmentSection, data: DataSection, *, rewards: bool, held_out: Prompts) -> None:
        """Check the settings against those that say what a prompt, an answer or a reward is without an agent."""
        self._check_tasksets({**named("data.prompts", data.prompts), **named("eval.prompts", held_out)})
        if not self.program:
            if idle := sorted(changed(self, {each.name for each in fields(self)})):
                raise ValueError(f"agents.{idle[0]} is of an agent, and agents.program names none: leave it out")
            return
        if self.public_url and not self.port:
            raise ValueError(
                f"agents.public_url = {self.public_url!r} leads to a port, and agents.port = 0 is any "
                "that is free: set it"
            )
        others = {
            f"environment.{environment.answering}": environment.answering,
            "data.tools": data.tools,
        }
        for key in (key for key, given in others.items() if given):
            raise ValueError(
                f"agents.program = {self.program!r} has an agent that answers, and shows tools of its own: leave "
                f"{key} out"
            )
        if data.over_long == "truncate":
            raise ValueError(
                "data.over_long = 'truncate' would cut off what an agent has said first: filter such prompts, or raise "
                "data.max_prompt_tokens"
            )
        if data.column != "prompt" or any(each.column for each in (*sources(data.prompts), *sources(held_out))):
            raise ValueError("the agent is given whole rows, so that no column holds the prompt: leave column out")
        if rewards:
            raise ValueError(
                f"agents.program = {self.program!r} has an agent that returns the reward: leave [[rewards]] out"
            )

    def _check_tasksets(self, prompts: Mapping[str, PromptSource]) -> None:
        runs = self.program == VERIFIERS
        for key, source in prompts.items():
            if source.taskset and not runs:
                raise ValueError(
                    f"{key} = {source.path!r} is a taskset, and agents.program does not run its tasks: set "
                    f"agents.program = {VERIFIERS!r}"
                )
            if runs and not source.taskset and source.path != ROWS:
                raise ValueError(
                    f"agents.program = {VERIFIERS!r} runs tasks of tasksets, and {key} = {source.path!r} is none: name "
                    f"one as '{VERIFIERS}:NAME', or another program"
                )
            of_others = {"split", "subset", "column"} if source.taskset else {"config"}
            if idle := sorted(changed(source, of_others)):
                other = "a taskset has no such" if source.taskset else "only a taskset has one"
                raise ValueError(f"{key} = {source.path!r} has a {idle[0]}, and {other}: leave it out")
