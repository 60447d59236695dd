"""Scripted faults: the fault, the model and its call; and wrappers that inject them into any model.

A script is a tuple of :class:`Fault`, plain values that can be printed and generated. A wrapper keeps the protocol of
its model, and changes nothing outside of its faults. Nothing in a script is random, nor is anything else in virtual
time: a script that broke a run breaks it again.

Example:
    >>> from oppo import Overcommit, ppo
    >>> from oppo.testing import *
    >>> script = (Fault("judge", "finish", Raise(TimeoutError), call=1), Fault("critic", "extend", Slow(5.0)))
    >>> graph = ppo(
    ...     policy=FakePolicy(),
    ...     reference=FakeScorer(fake_per_token),
    ...     reward=FaultyScorer("judge", FakeScorer(fake_scalar), script),
    ...     critic=FaultyCritic("critic", FakeCritic(), script),
    ...     trainer=FakeTrainer(),
    ...     admission=Overcommit(batch=4, overcommit=1),
    ... )
    >>> async def main() -> list[str]:
    ...     async with graph.open(prompts(8)) as run:
    ...         try:
    ...             await run.step()
    ...         except TimeoutError as error:
    ...             return [str(error), *error.__notes__]
    >>> for line in run_virtual(main):
    ...     print(line)
    call 1 of finish() of 'judge' fails, as its script says
    while scoring rollouts [1]
    in stage 'reward' of graph 'ppo', step 1
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, Generic, Literal, Protocol, TypeAlias, TypeVar, cast

import anyio

from oppo.errors import ModelError, ProtocolError
from oppo.events import Batch, Chunk, Drop, Finish, IntArray, Prompt, Response, ToolTokens
from oppo.limits import TurnLimit
from oppo.models import (
    Capabilities,
    CopiesWeights,
    Cut,
    Decode,
    Decoding,
    FixedDecoding,
    Policy,
    RewardFunction,
    Scorer,
    StreamingTrainer,
    SyncedModel,
    Trained,
    Trainer,
    TrainerCapabilities,
    Weights,
)
from oppo.stages.in_flight import require_turns
from oppo.testing.virtual_time import VirtualTimeLoop
from oppo.turns import Answer, Environment, Turn, TurnDecode

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

# Of a policy and its decodes; a scorer (`load` where it is synced); a trainer; a reward function; an environment
Method: TypeAlias = Literal[
    "open", "decoding", "read", "turn", "aclose", "load", "extend", "finish", "forget",
    "update", "accumulate", "commit", "sync_weights", "call", "answer",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Call:
    """A call that a fault strikes: the ``number``-th, from 0, of a method of ``model``, the wrapper."""

    place: str
    method: Method
    number: int
    arguments: tuple[Any, ...]
    model: Any


class FaultKind:
    """What goes wrong. A frozen dataclass that inherits from this is a kind of your own."""

    def fits(self, method: Method) -> bool:
        """Return whether a call of the method can go wrong so."""
        del method
        return True

    def strikes(self, since: int) -> bool:
        """Return whether it strikes ``since`` calls after the fault's own."""
        return since == 0

    async def before(self, call: Call) -> tuple[Any, ...]:
        """Wait or raise before the call, and return its arguments."""
        return call.arguments

    def after(self, call: Call, answer: Any) -> Any:
        """Return what the caller gets in place of the model's answer, or raise."""
        del call
        return answer


@dataclass(frozen=True, slots=True)
class Raise(FaultKind):
    """The call raises before it does anything."""

    error: type[Exception] = ModelError

    async def before(self, call: Call) -> tuple[Any, ...]:
        raise self.error(f"{call.place} fails, as its script says")


@dataclass(frozen=True, slots=True)
class Hang(FaultKind):
    """The call never returns, until it is cancelled."""

    async def before(self, call: Call) -> tuple[Any, ...]:
        loop, message = asyncio.get_running_loop(), f"{call.place} hangs, as its script says"
        withdraw = loop.on_deadlock(lambda: message) if isinstance(loop, VirtualTimeLoop) else None
        try:
            await anyio.sleep_forever()
        finally:
            if withdraw is not None:
                withdraw()
        return call.arguments


@dataclass(frozen=True, slots=True)
class Slow(FaultKind):
    """The call takes ``seconds`` longer."""

    seconds: float

    async def before(self, call: Call) -> tuple[Any, ...]:
        await anyio.sleep(self.seconds)
        return call.arguments


@dataclass(frozen=True, slots=True)
class Flap(FaultKind):
    """From this call on ``down`` calls fail, then ``up`` work, in turn; with ``up=0``, all further calls work."""

    down: int = 1
    up: int = 0

    def __post_init__(self) -> None:
        if self.down < 1 or self.up < 0:
            raise ValueError(f"a flap has at least one call down and none or more up, not {self.down} and {self.up}")

    def strikes(self, since: int) -> bool:
        return since >= 0 and (since % (self.down + self.up) if self.up else since) < self.down

    async def before(self, call: Call) -> tuple[Any, ...]:
        raise ConnectionError(f"{call.place}: connection refused, as its script says")


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
        model: the name that its wrapper was given.
        method: of the model; ``read``, ``turn`` and ``aclose`` are counted over all decodes of the policy.
        does: what goes wrong.
        call: in which call of the method, from 0.

    Raises:
        ValueError: the method cannot go wrong so.
    """

    model: str
    method: Method
    does: FaultKind
    call: int = 0

    def __post_init__(self) -> None:
        if not self.does.fits(self.method):
            raise ValueError(f"{self.method}() cannot do {self.does}")

    @property
    def place(self) -> str:
        return f"call {self.call} of {self.method}() of {self.model!r}"


Script: TypeAlias = tuple[Fault, ...]


@dataclass(eq=False)
class Faulty:
    name: str
    inner: Any
    script: Script = ()
    behind: int = field(default=0, init=False)  # versions by which the one that it reports lags its model's
    calls: Counter[Method] = field(default_factory=Counter, init=False, repr=False)
    struck: list[Fault] = field(default_factory=list, init=False, repr=False)

    @property
    def version(self) -> int:
        return cast("int", self.inner.version) - self.behind

    async def played(self, method: Method, call: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        number = self.calls[method]
        self.calls[method] += 1
        striking = list[tuple[FaultKind, Call]]()
        for fault in self.script:
            if (fault.model, fault.method) == (self.name, method) and fault.does.strikes(number - fault.call):
                self.struck.append(fault)
                one = Call(replace(fault, call=number).place, method, number, arguments, self)
                striking.append((fault.does, one))
                arguments = await fault.does.before(one)
        answer = await call(*arguments)
        for kind, one in striking:
            answer = kind.after(one, answer)
        return answer


class _FaultySynced(Faulty):
    inner: SyncedModel

    async def load(self, weights: Weights) -> None:
        self.behind = 0
        await self.played("load", self.inner.load, weights)


@dataclass(eq=False)
class FaultyDecode:
    inner: Decode
    policy: FaultyPolicy

    async def read(self, limit: int) -> Chunk | ToolTokens:
        return await self.policy.played("read", self.inner.read, limit)

    async def turn(self) -> IntArray | None:
        return await self.policy.played("turn", self._with_turns.turn)

    def bound(self, limit: TurnLimit, start: int) -> None:
        self._with_turns.bound(limit, start)

    def proceed(self, given: IntArray) -> bool:
        return self._with_turns.proceed(given)

    def finish(self) -> bool:
        return self._with_turns.finish()

    @property
    def _with_turns(self) -> TurnDecode:
        return cast("TurnDecode", self.inner)

    async def aclose(self) -> None:
        await self.policy.played("aclose", self.inner.aclose)


@dataclass(eq=False)
class FaultyPolicy(_FaultySynced):
    """A policy with the faults of ``name`` in ``script``."""

    inner: Policy

    @property
    def capabilities(self) -> Capabilities:
        """The model's, except that rollouts cannot join, nor sampling vary, nor progress be reported."""
        return replace(
            self.inner.capabilities,
            adds_while_decoding=False,
            adds_while_held=False,
            varies_sampling=False,
            reports_progress=False,
        )

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FaultyDecode]:
        return await self.played("open", partial(self._opened, self.inner.open), rollouts)

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FaultyDecode]:
        return await self.played("open", partial(self._opened, require_turns(self.inner).open_turns), rollouts)

    async def _opened(
        self,
        open_: Callable[[Sequence[Prompt | Response]], Awaitable[Sequence[Decode]]],
        rollouts: Sequence[Prompt | Response],
    ) -> Sequence[FaultyDecode]:
        return [FaultyDecode(decode, self) for decode in await open_(rollouts)]

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        """Decode while the context is open."""
        mine = [decode.inner for decode in live if isinstance(decode, FaultyDecode)]
        if len(mine) != len(live):
            raise ProtocolError(f"only decodes of {self.name!r} can be decoded; {len(live) - len(mine)} are not")
        return self._decoding(mine, cut)

    @asynccontextmanager
    async def _decoding(self, live: Sequence[Decode], cut: Cut) -> AsyncIterator[Decoding]:
        async def opened(live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
            return self.inner.decoding(live, cut)

        async with await self.played("decoding", opened, live, cut):
            yield FixedDecoding(self.name)


@dataclass(eq=False)
class FaultyScorer(Faulty, Generic[T]):
    """A frozen scorer with the faults of ``name`` in ``script``; see :class:`FaultyCritic` for one that is trained."""

    inner: Scorer[T]

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        await self.played("extend", self.inner.extend, events)

    async def finish(self, finished: Sequence[Finish]) -> Sequence[T]:
        return await self.played("finish", self.inner.finish, finished)

    async def forget(self, rollouts: Sequence[int]) -> None:
        await self.played("forget", self.inner.forget, rollouts)


class SyncableScorer(SyncedModel, Scorer[T_co], Protocol[T_co]): ...


@dataclass(eq=False)
class FaultyCritic(_FaultySynced, FaultyScorer[T]):
    """A scorer whose weights follow the trainer's, with the faults of ``name`` in ``script``."""

    inner: SyncableScorer[T]

    async def copied(self, weights: Weights) -> Weights:
        return await self.inner.copied(weights) if isinstance(self.inner, CopiesWeights) else deepcopy(weights)


@dataclass(eq=False)
class FaultyTrainer(Faulty):
    """A trainer with the faults of ``name`` in ``script``."""

    inner: Trainer

    @property
    def capabilities(self) -> TrainerCapabilities:
        return TrainerCapabilities(accumulates=TrainerCapabilities.of(self.inner).accumulates)

    async def update(self, batch: Batch) -> Trained:
        return await self.played("update", self.inner.update, batch)

    async def accumulate(self, part: Batch) -> None:
        await self.played("accumulate", cast("StreamingTrainer", self.inner).accumulate, part)

    async def commit(self, batch: Batch) -> Trained:
        return await self.played("commit", cast("StreamingTrainer", self.inner).commit, batch)

    async def sync_weights(self, *synced: SyncedModel) -> None:
        await self.played("sync_weights", self.inner.sync_weights, *synced)


@dataclass(eq=False)
class FaultyEnvironment(Faulty):
    """An environment with the faults of ``name`` in ``script``."""

    inner: Environment

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        return await self.played("answer", self.inner.answer, turn)


def faulty_reward(name: str, function: RewardFunction, script: Script) -> RewardFunction:
    """Return ``function`` with the faults of ``name`` in ``script``, async, under the same signature."""
    player = Faulty(name, function, script)

    @wraps(function)
    async def faulty(**arguments: object) -> object:
        async def call() -> object:
            result = function(**arguments)
            return await result if isinstance(result, Awaitable) else result

        return await player.played("call", call)

    return faulty
