"""Scripts of faults: what goes wrong, in which call of which model. Plain values, to be printed, drawn and kept.

A script is a tuple of :class:`Fault`; the wrappers of :mod:`oppo.testing.faulty` play it. Nothing in it is random, and
in virtual time nothing else is either: a script that broke a run breaks it again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import anyio

from oppo.errors import ModelError

Method: TypeAlias = Literal[
    "open", "decoding", "read", "aclose", "load", "extend", "finish", "forget", "update", "publish", "call"
]
"""Of a policy and its decodes: ``open``, ``decoding``, ``read``, ``aclose``, ``load``. Of a scorer: ``extend``,
``finish``, ``forget``, and ``load`` if it follows the trainer. Of a trainer: ``update``, ``publish``. Of a reward
function: ``call``."""

Spoilt: TypeAlias = Literal["nan", "count", "shape", "none", "empty", "version", "order", "token", "stranger"]
"""How an answer is wrong; :data:`SPOILT` says which can be."""


@dataclass(frozen=True, slots=True)
class Raise:
    """The call raises, before anything is done."""

    error: type[Exception] = ModelError


@dataclass(frozen=True, slots=True)
class Hang:
    """The call never returns, until it is cancelled."""


@dataclass(frozen=True, slots=True)
class Slow:
    """The call takes so many seconds longer."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Garbage:
    """The call does its work, and answers what nobody may answer.

    Attributes:
        what: ``count``: one item too few. ``nan``: no numbers (of a piece: its log-probs). ``shape``: per-token values
            for one token too few; a scalar as an array; of a piece, one log-prob too few. ``none``: ``None`` for each
            rollout. ``empty``: a piece with no token that says there is more. ``version``: weights that do not exist
            yet; of ``load`` and ``update``: the version does not move. ``order``: a piece ends with older weights than
            it began with. ``token``: an id below 0. ``stranger``: of an update, a rollout that is in no batch.
    """

    what: Spoilt


@dataclass(frozen=True, slots=True)
class LoseSessions:
    """Before the call, every session of the model is lost: it knows no rollout any more."""


@dataclass(frozen=True, slots=True)
class Flap:
    """From this call on ``down`` calls fail, then ``up`` work, and so on; with ``up=0``, all further ones work."""

    down: int = 1
    up: int = 0

    def __post_init__(self) -> None:
        if self.down < 1 or self.up < 0:
            raise ValueError(f"a flap has at least one call down and none or more up, not {self.down} and {self.up}")


@dataclass(frozen=True, slots=True)
class HalfPublished:
    """Only the first half of the followers (rounded down) is given the weights.

    Attributes:
        silent: the call then returns as if nothing had been; otherwise it raises a ``ModelError``.
    """

    silent: bool = False


Misdeed: TypeAlias = Raise | Hang | Slow | Garbage | LoseSessions | Flap | HalfPublished
Left: TypeAlias = Garbage | LoseSessions | HalfPublished
"""What is done by the wrapper of a model, since it needs what the call was given, or returns."""

SPOILT: Mapping[Method, tuple[Spoilt, ...]] = {
    "open": ("count",),
    "read": ("nan", "shape", "empty", "version", "order", "token"),
    "load": ("version",),
    "finish": ("nan", "count", "shape", "none"),
    "update": ("version", "stranger"),
    "call": ("nan", "count", "none"),
}
"""How the answer of each method can be wrong; those of the others say nothing."""

_SESSIONS = ("decoding", "extend", "finish")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        model: the name that its wrapper was given.
        method: what is called; ``read`` and ``aclose`` are counted over all decodes of the policy.
        does: what happens then.
        call: in which call, from 0.

    Raises:
        ValueError: the method cannot do that.

    Example:
        >>> Fault("reward", "finish", Slow(2.0), call=3).place
        "call 3 of finish() of 'reward'"
    """

    model: str
    method: Method
    does: Misdeed
    call: int = 0

    def __post_init__(self) -> None:
        possible = True
        if isinstance(self.does, Garbage):
            possible = self.does.what in SPOILT.get(self.method, ())
        elif isinstance(self.does, LoseSessions):
            possible = self.method in _SESSIONS
        elif isinstance(self.does, HalfPublished):
            possible = self.method == "publish"
        if not possible:
            raise ValueError(f"{self.method}() cannot do {self.does}; of garbage, it can do {SPOILT.get(self.method)}")

    @property
    def place(self) -> str:
        """Which call of which model it is."""
        return f"call {self.call} of {self.method}() of {self.model!r}"

    def strikes(self, call: int) -> bool:
        """Return whether it happens in this call of its method."""
        if not isinstance(self.does, Flap):
            return call == self.call
        since = call - self.call
        period = self.does.down + self.does.up
        return since >= 0 and (since % period if self.does.up else since) < self.does.down


Script: TypeAlias = tuple[Fault, ...]


@runtime_checkable
class _TellsDeadlocks(Protocol):
    def on_deadlock(self, describe: Callable[[], str]) -> Callable[[], None]: ...


@dataclass(eq=False)
class Player:
    """Plays the part of one model in a script.

    Attributes:
        model: its name there.
        script: of all models.
        calls: of each method so far.
        struck: the faults that have happened, in order; those of a flap, once for each call.
    """

    model: str
    script: Script
    calls: Counter[Method] = field(default_factory=Counter)
    struck: list[Fault] = field(default_factory=list)

    async def play(self, method: Method) -> Left | None:
        """Count a call and do what the script says of it; return what is left for the caller to do.

        Raises:
            Exception: the script says so.
        """
        call = self.calls[method]
        self.calls[method] += 1
        left: Left | None = None
        for fault in self.script:
            if (fault.model, fault.method) == (self.model, method) and fault.strikes(call):
                self.struck.append(fault)
                left = await self._do(fault, call) or left
        return left

    async def _do(self, fault: Fault, call: int) -> Left | None:
        where = f"call {call} of {fault.method}() of {fault.model!r}"
        match fault.does:
            case Slow(seconds):
                await anyio.sleep(seconds)
            case Hang():
                with _told_in_a_deadlock(f"{where} hangs, as its script says"):
                    await anyio.sleep_forever()
            case Raise(error):
                raise error(f"{where} fails, as its script says")
            case Flap():
                raise ConnectionError(f"{where}: nobody answers, as its script says")
            case _:
                return fault.does
        return None


@contextmanager
def _told_in_a_deadlock(sentence: str) -> Iterator[None]:
    """Have a loop of virtual time say so where nothing can go on."""
    loop = asyncio.get_running_loop()
    withdraw = loop.on_deadlock(lambda: sentence) if isinstance(loop, _TellsDeadlocks) else None
    try:
        yield
    finally:
        if withdraw is not None:
            withdraw()
