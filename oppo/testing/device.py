"""Virtual hardware: fake models that share a device slow each other down.

A piece of work is a :class:`Job`. Its *position* is what it has got done, in seconds: it moves with the clock where
nothing interferes, and slower beside work of other kinds. So a job's end is known as a position, whatever else begins
and ends until then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import anyio

from oppo.errors import running_loop

Interference: TypeAlias = Callable[[str, str], float]
"""``f(kind, other)``: by how much work takes longer beside work of another kind, as a share; 1 is twice as long."""


def time_shared(kind: str, other: str) -> float:
    """Return 1: kinds of work that run side by side take turns, as on a device that one of them keeps busy."""
    del kind, other
    return 1.0


class Device:
    """Hardware that several kinds of work share; work of one kind does not interfere with itself.

    Args:
        interference: of a kind of work by another; several others add up.

    Example:
        >>> device = Device()
        >>> async def main() -> float:
        ...     async with anyio.create_task_group() as tasks:
        ...         tasks.start_soon(device.work, "decode", 2.0)
        ...         tasks.start_soon(device.work, "score", 1.0)
        ...     return anyio.current_time()
        >>> from oppo.testing import run_virtual
        >>> run_virtual(main)
        3.0
    """

    def __init__(self, interference: Interference = time_shared) -> None:
        self._interference = interference
        self._jobs: dict[Job, None] = {}  # an ordered set

    async def work(self, kind: str, seconds: float) -> None:
        """Do so many seconds of work."""
        with self.job(kind) as job:
            await job.reach(job.position + seconds)

    @contextmanager
    def job(self, kind: str) -> Iterator[Job]:
        """Be at work on the device while the context lasts."""
        job = Job(kind)
        self._jobs[job] = None
        self._changed()
        try:
            yield job
        finally:
            del self._jobs[job]
            self._changed()

    def _changed(self) -> None:
        kinds = list(dict.fromkeys(job.kind for job in self._jobs))
        for job in self._jobs:
            job.slow_down(1 + sum(self._interference(job.kind, other) for other in kinds if other != job.kind))


class Job:
    """A piece of work in progress.

    Args:
        kind: of the work.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._slowdown = 1.0
        self._lost = 0.0  # seconds of the clock that brought nothing, while nothing interferes
        self._since = self._at = 0.0  # a time and the position then, while something does
        self._wake = anyio.Event()
        self._interrupted = False

    @property
    def position(self) -> float:
        """What is done by now, in seconds: without interference exactly the loop's time."""
        now = anyio.current_time()
        return now - self._lost if self._slowdown == 1 else self._at + (now - self._since) / self._slowdown

    def slow_down(self, slowdown: float) -> None:
        """Take so many times as long from now on."""
        if slowdown != self._slowdown:
            self._since, self._at = anyio.current_time(), self.position
            self._lost, self._slowdown = self._since - self._at, slowdown
            self._wake.set()

    def interrupt(self) -> None:
        """Let :meth:`reach` return now."""
        self._interrupted = True
        self._wake.set()

    async def reach(self, position: float) -> bool:
        """Wait until a position is reached; return false if interrupted before."""
        loop = running_loop()
        self._interrupted = False
        while True:
            self._wake = anyio.Event()
            due = False

            def arrive(wake: anyio.Event = self._wake) -> None:
                nonlocal due
                due = True
                wake.set()

            timer = loop.call_at(self._time_of(position), arrive)
            try:
                await self._wake.wait()
            finally:
                timer.cancel()
            if due or self._interrupted:
                return due

    def _time_of(self, position: float) -> float:
        """Return the loop time at which a position is reached if nothing changes."""
        if self._slowdown == 1:
            return position + self._lost
        return self._since + (position - self._at) * self._slowdown


async def spend(device: Device | None, kind: str, seconds: float) -> None:
    """Work for so long on a device, or sleep without one."""
    if device is None or not seconds:
        await anyio.sleep(seconds)
    else:
        await device.work(kind, seconds)
