"""Scripts of faults: what goes wrong, in which call of which model; plain values that can be printed and generated.

A script is a tuple of :class:`Fault`; the wrappers of :mod:`oppo.testing.faulty` play it. Nothing in it is random, nor
is anything else in virtual time: a script that broke a run breaks it again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

import anyio

from oppo.errors import ModelError
from oppo.simulate.engine import VirtualTimeLoop

# Of a policy and its decodes: `open`, `decoding`, `read`, `turn`, `aclose`, `load`. Of a scorer: `extend`, `finish`,
# `forget`, and `load` if it is synced. Of a trainer: `update`, `sync_weights`, and `accumulate` and `commit` of a batch
# in parts. Of a reward function: `call`. Of an environment: `answer`
Method: TypeAlias = Literal[
    "open",
    "decoding",
    "read",
    "turn",
    "aclose",
    "load",
    "extend",
    "finish",
    "forget",
    "update",
    "accumulate",
    "commit",
    "sync_weights",
    "call",
    "answer",
]

# How an answer is wrong; `SPOILT` lists what applies to each method
Spoilt: TypeAlias = Literal["nan", "count", "shape", "none", "empty", "version", "order", "token", "stranger"]


@dataclass(frozen=True, slots=True)
class Raise:
    """The call raises before it does anything."""

    error: type[Exception] = ModelError


@dataclass(frozen=True, slots=True)
class Hang:
    """The call never returns, until it is cancelled."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The call takes ``seconds`` longer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Garbage:
    """The call does its work and returns an invalid answer.

    Attributes:
        what: ``count``: one item too few. ``nan``: no numbers (of a piece: its log-probs). ``shape``: per-token values
            for one token too few; a scalar as an array; of a piece, one log-prob too few. ``none``: ``None`` for each
            rollout. ``empty``: a live piece without tokens. ``version``: weights that do not exist yet; of ``load`` and
            ``update``: the version does not move. ``order``: a piece ends with older weights than it began with.
            ``token``: an id below 0. ``stranger``: of an update, a rollout that is not in the batch. An answer to a
            turn can be ``empty``, or have a ``token`` below 0.
    """

    what: Spoilt


@dataclass(frozen=True, slots=True)
class LoseSessions:
    """The model loses all its sessions before the call."""


@dataclass(frozen=True, slots=True)
class Flap:
    """From this call on ``down`` calls fail, then ``up`` work, in turn; with ``up=0``, all further calls work."""

    down: int = 1
    up: int = 0

    def __post_init__(self) -> None:
        if self.down < 1 or self.up < 0:
            raise ValueError(f"a flap has at least one call down and none or more up, not {self.down} and {self.up}")


@dataclass(frozen=True, slots=True)
class HalfSynced:
    """Only the first half of the synced models (rounded down) gets the weights.

    Attributes:
        silent: the call then returns as if it had succeeded; otherwise it raises a ``ModelError``.
    """

    silent: bool = False


# Faults that a model's wrapper applies, since they need the arguments or the result of the call
Applied: TypeAlias = Garbage | LoseSessions | HalfSynced

FaultKind: TypeAlias = Raise | Hang | Slow | Flap | Applied

# How the answer of each method can be wrong; the other methods return nothing
SPOILT: Mapping[Method, tuple[Spoilt, ...]] = {
    "open": ("count",),
    "read": ("nan", "shape", "empty", "version", "order", "token"),
    "load": ("version",),
    "finish": ("nan", "count", "shape", "none"),
    "update": ("version", "stranger"),
    "commit": ("version", "stranger"),
    "call": ("nan", "count", "none"),
    "answer": ("empty", "token"),
}


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        model: the name that its wrapper was given.
        method: of the model; ``read``, ``turn`` and ``aclose`` are counted over all decodes of the policy.
        does: what goes wrong.
        call: in which call of the method, from 0.

    Raises:
        ValueError: the fault does not apply to the method.

    Example:
        >>> Fault("reward", "finish", Slow(2.0), call=3).place
        "call 3 of finish() of 'reward'"
    """

    model: str
    method: Method
    does: FaultKind
    call: int = 0

    def __post_init__(self) -> None:
        possible = True
        if isinstance(self.does, Garbage):
            possible = self.does.what in SPOILT.get(self.method, ())
        elif isinstance(self.does, LoseSessions):
            possible = self.method in {"decoding", "extend", "finish"}
        elif isinstance(self.does, HalfSynced):
            possible = self.method == "sync_weights"
        if not possible:
            raise ValueError(f"{self.method}() cannot do {self.does}; of garbage, it can do {SPOILT.get(self.method)}")

    @property
    def place(self) -> str:
        return f"call {self.call} of {self.method}() of {self.model!r}"

    def strikes(self, call: int) -> bool:
        """Return whether the fault happens in this call of its method."""
        if not isinstance(self.does, Flap):
            return call == self.call
        since = call - self.call
        period = self.does.down + self.does.up
        return since >= 0 and (since % period if self.does.up else since) < self.does.down


Script: TypeAlias = tuple[Fault, ...]


@dataclass(eq=False)
class Player:
    model: str  # its name in the script
    script: Script  # of all models
    calls: Counter[Method] = field(default_factory=Counter)  # of each method so far
    # the faults that happened, in order; a flap once for each call that failed
    struck: list[Fault] = field(default_factory=list)

    async def play(self, method: Method) -> Applied | None:
        """Count a call and play its faults; return the fault that the caller must apply."""
        call = self.calls[method]
        self.calls[method] += 1
        applied: Applied | None = None
        for fault in self.script:
            if (fault.model, fault.method) == (self.model, method) and fault.strikes(call):
                self.struck.append(fault)
                applied = await _play(fault, call) or applied
        return applied


async def _play(fault: Fault, call: int) -> Applied | None:
    where = replace(fault, call=call).place
    match fault.does:
        case Slow(seconds):
            await anyio.sleep(seconds)
        case Hang():
            await _hang(f"{where} hangs, as its script says")
        case Raise(error):
            raise error(f"{where} fails, as its script says")
        case Flap():
            raise ConnectionError(f"{where}: connection refused, as its script says")
        case _:
            return fault.does
    return None


async def _hang(message: str) -> None:
    loop = asyncio.get_running_loop()
    withdraw = loop.on_deadlock(lambda: message) if isinstance(loop, VirtualTimeLoop) else None
    try:
        await anyio.sleep_forever()
    finally:
        if withdraw is not None:
            withdraw()
