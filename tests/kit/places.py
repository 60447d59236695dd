"""A place in virtual time, where scorers take turns."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from heapq import heappop
from typing import Generic, TypeVar

import anyio

from oppo.events import Chunk, Finish, Prompt, ToolTokens
from oppo.models import Weights
from oppo.observe import Span, SpanListener, silent
from oppo.scheduling import IN_ORDER, CallQueue, Preempted, Priority
from oppo.testing import FakeScorer

T = TypeVar("T")


class FakePlace(CallQueue):
    """Makes one call at a time, in the order of arrival, urgent ones first (:mod:`oppo.scheduling`)."""

    def __init__(self, listener: SpanListener = silent) -> None:
        super().__init__()
        self._listener = listener
        self._busy = False

    @asynccontextmanager
    async def reserved(
        self, priority: Priority = IN_ORDER, track: str = "", label: str = "call"
    ) -> AsyncIterator[None]:
        """Hold the place while the context lasts; its span has this track and label."""
        go = anyio.Event()
        call = self.put(go.set, go.set, priority)
        self._next()
        try:
            await go.wait()
        except BaseException:
            if go.is_set() and not call.withdrawn:
                self._busy = False
            call.withdrawn = True
            self._next()
            raise
        if call.withdrawn:
            raise Preempted
        start = anyio.current_time()
        try:
            yield
        finally:
            self._listener(Span(track, label, start, anyio.current_time()))
            self._busy = False
            self._next()

    def release(self, holder: object) -> None:
        super().release(holder)
        self._next()

    def _next(self) -> None:
        while not self._busy and self._may_leave():
            call = heappop(self._pending)[-1]
            if not call.withdrawn:
                self._busy = True
                call.begin()


class PlacedScorer(Generic[T]):
    def __init__(self, scorer: FakeScorer[T], place: FakePlace, track: str = "") -> None:
        self._scorer = scorer
        self._place = place
        self._track = track

    @property
    def version(self) -> int:
        return self._scorer.version

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
        async with self._place.reserved(priority, self._track, "extend"):
            await self._scorer.extend(events)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[T]:
        async with self._place.reserved(priority, self._track, "finish"):
            return await self._scorer.finish(finished)

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        async with self._place.reserved(priority, self._track, "forget"):
            await self._scorer.forget(rollouts)


class PlacedCritic(PlacedScorer[T]):
    async def load(self, weights: Weights) -> None:
        self._scorer.version = weights.version

    async def copied(self, weights: Weights) -> Weights:
        return weights
