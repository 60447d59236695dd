"""The delay of the event loop: a task sleeps for a short period and measures how late it wakes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import anyio

from oppo.errors import as_itself
from oppo.observe import now

PERIOD = 0.005
"""Seconds between two beats."""

GAP = "loop/worst_gap_s"
"""The metric of the worst delay in a step."""


class Heartbeat:
    """Beats on the event loop every ``period`` seconds and keeps the worst delay, which shows code that blocks it."""

    def __init__(
        self,
        period: float = PERIOD,
        *,
        clock: Callable[[], float] = now,
        sleep: Callable[[float], Awaitable[None]] = anyio.sleep,
    ) -> None:
        self._period = period
        self._clock = clock
        self._sleep = sleep
        self._beat = clock()
        self._worst = 0.0

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Beat while the context is open."""
        with as_itself():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._beat_forever, name="heartbeat")
                yield
                tasks.cancel_scope.cancel()

    def take(self) -> float:
        """Return the worst delay since the last call in seconds, that of an overdue beat included, and reset it."""
        worst, self._worst = max(self._worst, self._late()), 0.0
        self._beat = self._clock()
        return worst

    async def _beat_forever(self) -> None:
        self._beat = self._clock()
        while True:
            await self._sleep(self._period)
            self._worst = max(self._worst, self._late())
            self._beat = self._clock()

    def _late(self) -> float:
        return max(0.0, self._clock() - self._beat - self._period)
