"""``[environment]``: what answers a response; ``[agents]``: an agent in place of prompts, environment and rewards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Final, Literal

from annotated_types import Ge, Le

from oppo.config.sections import OPENENV, VERIFIERS, DataSection, RunSection, StepSection, placed
from oppo.declared import Filled, FromList, Name, OneOf, Positive, PositiveCount, changed, setting
from oppo.environments.functions import REQUEST
from oppo.errors import in_toml
from oppo.user_code import SPEC


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSection:
    """``[environment]``: what answers a response that has ended at a stop, as a tool does."""

    source: Annotated[str, OneOf(("",), "file.py:function", SPEC)] = setting(
        "",
        "`file.py:function` that answers a response at a stop token or string, as a tool does, so that the response "
        "goes on; empty: none",
    )
    tools: Annotated[tuple[Annotated[str, OneOf((), "file.py:function", SPEC)], ...], FromList()] = setting(
        (),
        "functions that the policy calls by its chat template, each as `file.py:function`, with type hints and a "
        "docstring in Google's style, of which the template shows it their schemas; empty: none",
    )
    tools_column: str = setting(
        "",
        "column of the data with a list of names, of those `tools` that a row shows the policy, and lets it call; a "
        "row without it has all; empty: none",
    )
    factory: str | dict[str, Filled] = setting(
        "",
        "`file.py:name` of a class with `reset`, methods that are tools and maybe `get_reward`, as TRL's "
        "`environment_factory`, or of a function that makes an instance; or `openenv:URL`, a server of OpenEnv; or a "
        "table of several, `{guess = 'games.py:Guess', ...}`, by the value of the column `environment`; empty: none",
    )
    on_failure: Literal["fail", "drop", "answer"] | None = setting(
        None,
        "if a function fails: stop the run, drop the rollout, or, of tools, answer with the error; absent: `fail`, of "
        "tools `answer`",
    )
    max_turns: PositiveCount | None = setting(
        None, "answers of tools in a response, after which a call ends it; absent: no limit"
    )
    compact: PositiveCount | None = setting(
        None,
        "tokens of a response, of answers too, after which the policy is asked for a summary of its work with `tools`, "
        "and goes on behind it in another response, a segment of the rollout; absent: never",
    )
    summary_tokens: PositiveCount = setting(512, "of a summary at most")
    summary_request: Filled = setting(REQUEST, "for a summary, the message of a user")
    max_segments: Annotated[int, Ge(2)] = setting(
        8,
        "of a rollout; the last one goes on until it ends or has no room, where `algorithm.mask_truncated` masks all",
    )
    process: bool = setting(
        default=False,
        description="call a sync function in its own processes, where it may hold the interpreter lock for long; a "
        "crash is then a failure like others",
        resume="free",
    )
    concurrency: PositiveCount | None = setting(
        None, "function calls that may overlap; absent: 64, or 4 in processes", resume="free"
    )
    timeout: Positive | None = setting(
        None,
        "seconds after which a call of the function, a tool, `reset` or `get_reward` has failed, not counting the "
        "start of its process; an async function is then cancelled, a process interrupted, or killed if it goes on",
        resume="free",
    )
    keep_special_tokens: bool = setting(
        default=False,
        description="keep special tokens in the text for the function, and take those that its answer spells as "
        "special tokens; otherwise an answer is ordinary text, whatever it spells",
    )

    @property
    def longer(self) -> int:
        """Tokens by which a summary may make a prompt longer; tokenized anew it may have more than it had."""
        return 0 if self.compact is None else 2 * self.summary_tokens

    @property
    def factories(self) -> Mapping[str, str]:
        if isinstance(self.factory, dict):
            return {f"environment.factory.{name}": spec for name, spec in self.factory.items()}
        return {"environment.factory": self.factory} if self.factory else {}

    @property
    def answering(self) -> str:
        return next((key for key in ("source", "tools", "factory") if getattr(self, key)), "")

    @property
    def files(self) -> dict[str, Path]:
        named = {"environment.source": self.source}
        named |= {f"environment.tools[{number}]": spec for number, spec in enumerate(self.tools)}
        named |= self.factories
        return {name: Path(spec.rpartition(":")[0]) for name, spec in named.items() if SPEC.match(spec)}

    def within(self, folder: Path) -> EnvironmentSection:
        made, tools = self.factory, tuple(placed(each, folder) for each in self.tools)
        factory = (
            placed(made, folder)
            if isinstance(made, str)
            else {name: placed(spec, folder) for name, spec in made.items()}
        )
        return replace(self, source=placed(self.source, folder), tools=tools, factory=factory)


def environment_fault(
    given: EnvironmentSection, data: DataSection, step: StepSection, algorithm: object, *, privileged: bool
) -> str:
    does = {"source": "answers every turn", "tools": "answer calls", "factory": "answers calls of its methods"}
    answering = [key for key in does if getattr(given, key)]
    served = (OPENENV + "http://", OPENENV + "https://")
    odd = [each for each in given.factories.items() if not (SPEC.match(each[1]) or each[1].startswith(served))]
    key, spec = (odd or [("", "")])[0]
    calls = bool(given.tools or given.factory)
    idle: dict[str, tuple[object, str]] = {
        "on_failure": (not calls and given.on_failure == "answer", "tools"),
        "max_turns": (not calls and given.max_turns, "tools"),
        "keep_special_tokens": (
            calls and given.keep_special_tokens,
            "text of a function; tools answer by the chat template",
        ),
        **{key: (not given.tools and getattr(given, key), "environment.tools") for key in ("tools_column", "compact")},
    }
    of_summaries = changed(given, {"summary_tokens", "summary_request", "max_segments"})
    idle |= dict.fromkeys(of_summaries, (given.compact is None, "environment.compact"))
    credit = getattr(algorithm, "credit", "response")
    unlike = {
        "step.admission = 'tail-batched' begins late ones anew": step.admission == "tail-batched",
        "step.algorithm = 'online_dpo' compares two responses": step.algorithm == "online_dpo",
        f"algorithm.credit = {credit!r} compares parts of one response": credit != "response",
        "[teacher] has another prompt for one response": privileged,
        "data.over_long = 'truncate' leaves prompts that cannot be rendered anew": data.over_long == "truncate",
    }
    words = dict[str, object]()
    for first, other in pairwise(answering):
        both = f"{in_toml(getattr(given, first))} {does[first]}, and environment.{other} {does[other]}"
        words[f"environment.{first} = {both}: leave one of them out"] = True
    words |= {
        f"{key}: expected file.py:name, or openenv:URL, such as openenv:http://localhost:8000, got {spec!r}": odd,
        f"data.tools = {data.tools!r} shows tools that nothing calls, and environment.{given.answering} shows its own: "
        "leave data.tools out": data.tools and calls,
        "environment.process = true calls functions in other processes, and the instances of environment.factory are "
        "objects of this one: leave process out": given.factory and given.process,
    }
    words |= {
        f"environment.{name} = {in_toml(getattr(given, name))} is for {of}: leave it out": is_given
        for name, (is_given, of) in idle.items()
    }
    words |= {
        f"environment.compact = {given.compact} has rollouts go on in further responses, and {why}: leave one of the "
        "two out": given.compact and holds
        for why, holds in unlike.items()
    }
    return next((text for text, holds in words.items() if holds), "")


_URL: Final = re.compile(r"^$|^https?://[^\s/]+(/\S*)?\Z")

POLICY: Final = "policy"
INITIAL: Final = "initial"

_PROGRAM: Final = re.compile(f"^$|^{VERIFIERS}$|{SPEC.pattern}")


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentsSection:
    """``[agents]``: an agent whose conversations are the prompts, the responses and the rewards of the run."""

    program: Annotated[str, OneOf((), f"file.py:function or {VERIFIERS}", _PROGRAM)] = setting(
        "",
        "`file.py:function` that is an agent: called with a row, the URL of a server that speaks OpenAI's and "
        "Anthropic's APIs and a key, it returns the reward of its conversation; `verifiers`: runs the tasks of the "
        "tasksets that are the prompts; empty: none",
    )
    roles: dict[Name, Filled] = field(
        default_factory=dict,
        metadata={
            "description": "the roles that its requests name as their `model`, and who plays each: `policy`, or, "
            "frozen, the `initial` weights or a checkpoint: `{first = 'policy', second = 'initial'}`; it returns "
            "rewards by role; empty: it has none"
        },
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
    def trained(self) -> Sequence[str]:
        return [role for role, player in self.roles.items() if player == POLICY]

    @property
    def frozen(self) -> Mapping[str, str]:
        return {role: player for role, player in self.roles.items() if player != POLICY}

    def single(self, run: RunSection, step: StepSection) -> tuple[str, str] | None:
        late = step.admission == "tail-batched"
        single = {
            "run.deterministic = true decodes one of an agent, since others come when timing has it": run.deterministic,
            "step.admission = 'tail-batched', which begins late rollouts anew, decodes one": late,
            "step.algorithm = 'online_dpo' compares two responses to a prompt": step.algorithm == "online_dpo",
        }
        why = next((why for why, holds in single.items() if holds and len(self.trained) > 1), None)
        return None if why is None else (" and ".join(map(repr, self.trained)), why)

    @property
    def files(self) -> dict[str, Path]:
        return {"agents.program": Path(self.program.rpartition(":")[0])} if SPEC.match(self.program) else {}

    def within(self, folder: Path) -> AgentsSection:
        return replace(self, program=placed(self.program, folder))
