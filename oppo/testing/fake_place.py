"""A place in virtual time: scorers in it take turns, in the order of their calls' priorities, as in a thread."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar, cast

import anyio

from oppo.events import Chunk, Finish, Given, Prompt
from oppo.models import Follower, Scorer, Weights
from oppo.observe import Span, SpanListener, silent
from oppo.scheduling import IN_ORDER, Preempted, Priority
from oppo.testing.faulty import FollowingScorer

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class _Pending:
    urgent: bool
    is_preempted: Callable[[], bool]
    preempted: bool = False
    go: anyio.Event = field(default_factory=anyio.Event)


class FakePlace:
    """Makes one call at a time, in the order of arrival, urgent ones first (:mod:`oppo.scheduling`).

    Args:
        listener: called with the span of each call.

    Example:
        >>> place = FakePlace()
        >>> async def call() -> float:
        ...     async with place.reserved():
        ...         await anyio.sleep(1)
        ...     return anyio.current_time()
        >>> from oppo.testing import run_virtual
        >>> run_virtual(call)
        1.0
    """

    def __init__(self, listener: SpanListener = silent) -> None:
        self._listener = listener
        self._pending: list[tuple[bool, int, _Pending]] = []
        self._arrived = 0
        self._holders: set[object] = set()
        self._busy = False

    @asynccontextmanager
    async def reserved(
        self, priority: Priority = IN_ORDER, track: str = "", label: str = "call"
    ) -> AsyncIterator[None]:
        """Hold the place while the context lasts; its span has this track and label.

        Raises:
            Preempted: the call is preemptible and was not made.
        """
        call = _Pending(priority.claim(self), priority.preemption())
        heappush(self._pending, (not call.urgent, self._arrived, call))
        self._arrived += 1
        self._next()
        try:
            await call.go.wait()
        except BaseException:
            self._withdraw(call)
            raise
        if call.preempted:
            raise Preempted
        start = anyio.current_time()
        try:
            yield
        finally:
            self._listener(Span(track, label, start, anyio.current_time()))
            self._busy = False
            self._next()

    def hold(self, holder: object) -> None:
        """Keep calls that are not urgent until ``holder`` releases the place; idempotent."""
        self._holders.add(holder)

    def release(self, holder: object) -> None:
        """End the hold of ``holder``."""
        self._holders.discard(holder)
        self._next()

    def _withdraw(self, call: _Pending) -> None:
        """Forget a call that was cancelled."""
        if call.go.is_set() and not call.preempted:
            self._busy = False
        self._pending = sorted(each for each in self._pending if each[-1] is not call)
        self._next()

    def _next(self) -> None:
        """Begin the next call if the place is free and the call may be made."""
        if self._busy:
            return
        for _, _, call in self._pending:
            call.preempted = call.is_preempted()
            if call.preempted:
                call.go.set()
        self._pending = sorted(each for each in self._pending if not each[-1].preempted)
        if self._pending and (self._pending[0][-1].urgent or not self._holders):
            self._busy = True
            heappop(self._pending)[-1].go.set()


class PlacedScorer(Generic[T]):
    """A scorer that is called in a place."""

    def __init__(self, scorer: Scorer[T], place: FakePlace, track: str = "") -> None:
        self._scorer = scorer
        self._place = place
        self._track = track

    @property
    def version(self) -> int:
        """The version of the weights."""
        return self._scorer.version

    async def extend(self, events: Sequence[Prompt | Chunk | Given], *, priority: Priority = IN_ORDER) -> None:
        """Read more of some rollouts."""
        async with self._place.reserved(priority, self._track, "extend"):
            await self._scorer.extend(events)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[T]:
        """Return one value for each rollout, and forget its session."""
        async with self._place.reserved(priority, self._track, "finish"):
            return await self._scorer.finish(finished)

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        """Drop sessions."""
        async with self._place.reserved(priority, self._track, "forget"):
            await self._scorer.forget(rollouts)


class PlacedFollower(PlacedScorer[T]):
    """A scorer that is called in a place, and follows the trainer."""

    def __init__(self, scorer: FollowingScorer[T], place: FakePlace, track: str = "") -> None:
        super().__init__(scorer, place, track)
        self._follower = scorer

    async def load(self, weights: Weights) -> None:
        """Follow the trainer."""
        await self._follower.load(weights)

    async def copied(self, weights: Weights) -> Weights:
        """Return the weights: a version, which no update changes."""
        return weights


def placed(scorer: Scorer[T], place: FakePlace, track: str = "") -> PlacedScorer[T]:
    """Return a scorer that is called in a place; it follows the trainer if the given one does."""
    if isinstance(scorer, Follower):
        return PlacedFollower(cast("FollowingScorer[T]", scorer), place, track)
    return PlacedScorer(scorer, place, track)
