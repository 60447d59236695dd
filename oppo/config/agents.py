"""``[agents]``: an agent in place of prompts, environment and rewards."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final, Literal

from annotated_types import Ge, Le

from oppo.config.sections import (
    VERIFIERS,
    placed,
)
from oppo.declared import Filled, OneOf, Positive, setting
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
