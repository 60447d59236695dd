"""Wrappers that inject the faults of a script into fakes, or into any other models.

A wrapper keeps the protocol of its model, and changes nothing outside of the script's faults.

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

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Generic, TypeVar, cast

import numpy as np

from oppo.errors import ModelError, ProtocolError
from oppo.events import Batch, Chunk, Drop, Finish, IntArray, Prompt, Response, ToolTokens
from oppo.models import (
    Capabilities,
    Cut,
    Decode,
    Decoding,
    FixedDecoding,
    Piece,
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
from oppo.simulate.models import SyncableScorer
from oppo.stages.generate import require_turns
from oppo.testing.script import Garbage, HalfSynced, LoseSessions, Player, Script, Spoilt
from oppo.turns import Answer, Environment, Turn, TurnDecode
from oppo.weight_sync import CopiesWeights, name_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

FAR = 1_000  # versions by which a spoilt piece is ahead of the current weights, or behind them


class _FaultySynced:
    """Loads weights as the script directs, and may report the version that it had before."""

    inner: SyncedModel
    player: Player
    _stale_version: int | None = None

    @property
    def version(self) -> int:
        return self.inner.version if self._stale_version is None else self._stale_version

    async def load(self, weights: Weights) -> None:
        before = self.inner.version
        fault = await self.player.play("load")
        await self.inner.load(weights)
        self._stale_version = before if fault == Garbage("version") else None


@dataclass(eq=False)
class FaultyDecode:
    inner: Decode
    player: Player

    async def read(self, limit: int) -> Piece:
        fault = await self.player.play("read")
        if fault == Garbage("empty"):
            none = np.zeros(0, np.int32)
            return Piece(none, none.astype(np.float32), none, "live")
        piece = await self.inner.read(limit)
        return spoilt_piece(piece, fault.what) if isinstance(fault, Garbage) and len(piece.tokens) else piece

    async def turn(self) -> IntArray | None:
        await self.player.play("turn")
        return await self._with_turns.turn()

    def proceed(self, given: IntArray) -> bool:
        return self._with_turns.proceed(given)

    def finish(self) -> bool:
        return self._with_turns.finish()

    @property
    def _with_turns(self) -> TurnDecode:
        return cast("TurnDecode", self.inner)

    async def aclose(self) -> None:
        await self.player.play("aclose")
        await self.inner.aclose()


@dataclass(eq=False)
class FaultyPolicy(_FaultySynced):
    """A policy with the faults of ``name`` in ``script``."""

    name: str
    inner: Policy
    script: Script = ()

    def __post_init__(self) -> None:
        self.player = Player(self.name, self.script)

    @property
    def capabilities(self) -> Capabilities:
        """Those of its model, except for those that need another policy behind it, and that rollouts cannot join."""
        return replace(
            self.inner.capabilities, adds_while_decoding=False, varies_sampling=False, reports_progress=False
        )

    async def open(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FaultyDecode]:
        return await self._opened(self.inner.open, rollouts)

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> Sequence[FaultyDecode]:
        return await self._opened(require_turns(self.inner).open_turns, rollouts)

    async def _opened(
        self,
        open_: Callable[[Sequence[Prompt | Response]], Awaitable[Sequence[Decode]]],
        rollouts: Sequence[Prompt | Response],
    ) -> Sequence[FaultyDecode]:
        fault = await self.player.play("open")
        decodes = [FaultyDecode(decode, self.player) for decode in await open_(rollouts)]
        return decodes[:-1] if fault == Garbage("count") else decodes

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        """Decode while the context is open.

        Raises:
            ProtocolError: a decode is of another policy.
        """
        mine = [decode.inner for decode in live if isinstance(decode, FaultyDecode)]
        if len(mine) != len(live):
            raise ProtocolError(f"only decodes of {self.name!r} can be decoded; {len(live) - len(mine)} are not")
        return self._decoding(mine, cut)

    @asynccontextmanager
    async def _decoding(self, live: Sequence[Decode], cut: Cut) -> AsyncIterator[Decoding]:
        if await self.player.play("decoding") == LoseSessions():
            for decode in live:
                await decode.aclose()
        async with self.inner.decoding(live, cut):
            yield FixedDecoding(self.name)


@dataclass(eq=False)
class FaultyScorer(Generic[T]):
    """A frozen scorer with the faults of ``name`` in ``script``; see :class:`FaultyCritic` for one that is trained."""

    name: str
    inner: Scorer[T]
    script: Script = ()
    _known: set[int] = field(default_factory=set, init=False, repr=False)

    def __post_init__(self) -> None:
        self.player = Player(self.name, self.script)

    @property
    def version(self) -> int:
        return self.inner.version

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        if await self.player.play("extend") == LoseSessions():
            await self._lose()
        await self.inner.extend(events)
        self._known.update(event.rollout for event in events)

    async def finish(self, finished: Sequence[Finish]) -> Sequence[T]:
        fault = await self.player.play("finish")
        if fault == LoseSessions():
            await self._lose()
        values = await self.inner.finish(finished)
        self._known.difference_update(event.rollout for event in finished)
        return spoilt_values(values, fault.what) if isinstance(fault, Garbage) else values

    async def forget(self, rollouts: Sequence[int]) -> None:
        await self.player.play("forget")
        self._known.difference_update(rollouts)
        await self.inner.forget(rollouts)

    async def _lose(self) -> None:
        await self.inner.forget(sorted(self._known))
        self._known.clear()


@dataclass(eq=False)
class FaultyCritic(_FaultySynced, FaultyScorer[T]):
    """A scorer whose weights follow the trainer's, with the faults of ``name`` in ``script``."""

    inner: SyncableScorer[T]

    async def copied(self, weights: Weights) -> Weights:
        """Return a copy of weights, its model's where that can make one."""
        return await self.inner.copied(weights) if isinstance(self.inner, CopiesWeights) else deepcopy(weights)


@dataclass(eq=False)
class FaultyTrainer:
    """A trainer with the faults of ``name`` in ``script``."""

    name: str
    inner: Trainer
    script: Script = ()

    def __post_init__(self) -> None:
        self.player = Player(self.name, self.script)
        self._behind = 0

    @property
    def version(self) -> int:
        return self.inner.version - self._behind

    async def update(self, batch: Batch) -> Trained:
        fault = await self.player.play("update")
        return self._with(fault, await self.inner.update(batch))

    @property
    def capabilities(self) -> TrainerCapabilities:
        return TrainerCapabilities(accumulates=TrainerCapabilities.of(self.inner).accumulates)

    async def accumulate(self, part: Batch) -> None:
        await self.player.play("accumulate")
        await cast("StreamingTrainer", self.inner).accumulate(part)

    async def commit(self, batch: Batch) -> Trained:
        fault = await self.player.play("commit")
        return self._with(fault, await cast("StreamingTrainer", self.inner).commit(batch))

    def _with(self, fault: object, trained: Trained) -> Trained:
        if fault == Garbage("version"):
            self._behind += 1
        if fault == Garbage("stranger"):
            return replace(trained, nonfinite=(*trained.nonfinite, -1))
        return trained

    async def sync_weights(self, *synced: SyncedModel) -> None:
        """Give the current weights to each model.

        Raises:
            ModelError: the script makes it fail half-way.
        """
        fault = await self.player.play("sync_weights")
        if not isinstance(fault, HalfSynced):
            await self.inner.sync_weights(*synced)
            return
        await self.inner.sync_weights(*synced[: len(synced) // 2])
        if not fault.silent:
            held = ", ".join(f"{name_of(one)} has version {one.version}" for one in synced)
            raise ModelError(f"sync_weights() of {self.name!r} fails half-way, as its script says: {held}")


@dataclass(eq=False)
class FaultyEnvironment:
    """An environment with the faults of ``name`` in ``script``."""

    name: str
    inner: Environment
    script: Script = ()

    def __post_init__(self) -> None:
        self.player = Player(self.name, self.script)

    async def answer(self, turn: Turn) -> Answer | Drop | None:
        fault = await self.player.play("answer")
        answer = await self.inner.answer(turn)
        if not isinstance(fault, Garbage) or not isinstance(answer, Answer):
            return answer
        return replace(answer, tokens=answer.tokens[:0] if fault.what == "empty" else -1 - answer.tokens)


def faulty_reward(name: str, function: RewardFunction, script: Script) -> RewardFunction:
    """Return ``function`` with the faults of ``name`` in ``script``, async, under the same signature."""
    player = Player(name, script)

    @wraps(function)
    async def faulty(**arguments: object) -> object:
        fault = await player.play("call")
        result = function(**arguments)
        scores = await result if isinstance(result, Awaitable) else result
        return spoilt_values(cast("Sequence[object]", scores), fault.what) if isinstance(fault, Garbage) else scores

    return faulty


def spoilt_piece(piece: Piece, what: Spoilt) -> Piece:
    spoilt: dict[str, Callable[[], Piece]] = {
        "nan": lambda: replace(piece, logprobs=np.full_like(piece.logprobs, np.nan)),
        "shape": lambda: replace(piece, logprobs=piece.logprobs[:-1]),
        "version": lambda: replace(piece, versions=piece.versions + np.int32(FAR)),
        "order": lambda: replace(piece, versions=np.append(piece.versions[:-1], piece.versions[:1] - np.int32(FAR))),
        "token": lambda: replace(piece, tokens=-1 - piece.tokens),
    }
    return spoilt[what]()


def spoilt_values(values: Sequence[T], what: Spoilt) -> Sequence[T]:
    if what == "count":
        return values[:-1]
    return [cast("T", _spoilt(value, what)) for value in values]  # of another type on purpose


def _spoilt(value: object, what: Spoilt) -> object:
    if what == "none":
        return None
    per_token = isinstance(value, np.ndarray)
    if what == "nan":
        return np.full_like(value, np.nan) if per_token else float("nan")
    return value[:-1] if isinstance(value, np.ndarray) else np.array([value])
