"""Virtual time: an event loop whose clock jumps to the next timer when every task waits, rows decoded together in it.

A test calls an async function through :func:`run_virtual` and asserts exact times; it needs no fixture, and a function
under Hypothesis can do the same for each example::

    def test_a_step_takes_as_long_as_its_slowest_stage() -> None:
        assert run_virtual(main) == 2.5

When every task waits and no timer is left, the loop raises :class:`oppo.errors.DeadlockError` out of whatever runs it.
Threads are refused: their work has no virtual duration.

Rows that a fake engine decodes together, a token of each in every decode step.

Time passes from event to event, not from token to token: between two decode steps in which a row ends, reaches a turn,
or satisfies its reader, the steps are only counted. So the cost of a lane grows with its events, and not with the
number or length of its rows.
"""

from __future__ import annotations

import asyncio
import heapq
import math
import selectors
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from contextlib import AbstractContextManager
from contextvars import Context
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar, TypeVarTuple

import anyio

from oppo.errors import DeadlockError, ProtocolError, running_loop

R = TypeVar("R")
Ts = TypeVarTuple("Ts")

# Seconds (116 days). Beyond it a float no longer resolves the nanosecond within which asyncio fires a timer
END_OF_TIME = 1e7


def run_virtual(main: Callable[[*Ts], Awaitable[R]], *args: *Ts) -> R:
    """Run ``main(*args)`` to its end in virtual time, from 0, and return what it returns.

    Raises:
        DeadlockError: every task waits, and no timer can wake one.
        ProtocolError: a thread was used.
    """
    return anyio.run(main, *args, backend_options={"loop_factory": VirtualTimeLoop})


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """A loop whose clock starts at 0 and moves only when nothing is ready to run.

    Attributes:
        virtual: tells code that uses threads on other loops to run inline on this one.
    """

    virtual = True

    def __init__(self) -> None:
        self._clock = 0.0
        self._timers: list[float] = []
        self._tables: list[Callable[[], str]] = []
        self._owner = threading.get_ident()
        self._intruder: str | None = None
        self._refused = False
        super().__init__(_IdleSelector(self._refuse_threads, self._pass_time))

    def time(self) -> float:
        """Return the virtual time, in seconds."""
        return self._clock

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        """Call ``callback`` when the clock shows ``when``, exactly."""
        heapq.heappush(self._timers, when)
        return super().call_at(when, callback, *args, context=context)

    def on_deadlock(self, describe: Callable[[], str]) -> Callable[[], None]:
        """Add ``describe()`` to the message of a deadlock; return a function that removes it again."""
        self._tables.append(describe)
        return lambda: self._tables.remove(describe)

    def _pass_time(self, timeout: float | None) -> None:
        # asyncio passes the distance to its next timer, at most a day. The time plus that distance may round to another
        # float than the timer's, so the clock is set from the timers themselves; earlier ones are cancelled and
        # skipped.
        distance = 0.0 if timeout is None else timeout
        while self._timers and (self._timers[0] <= self._clock or self._timers[0] - self._clock < distance):
            heapq.heappop(self._timers)
        if timeout is None or not self._timers or self._timers[0] == math.inf:
            raise DeadlockError(self._deadlock())
        self._clock = min(self._timers[0], self._clock + timeout) if timeout >= _DAY else self._timers[0]
        if self._clock > END_OF_TIME:
            raise OverflowError(f"virtual time has run past {END_OF_TIME:.0e} seconds: is something waiting in vain?")

    def _deadlock(self) -> str:
        names = ", ".join(sorted(task.get_name() for task in asyncio.all_tasks(self)))
        return "\n".join(
            [f"every task waits and nothing can wake one: {names}", *(describe() for describe in self._tables)]
        )

    def _refuse_threads(self) -> None:
        # Only once, so that the loop can be shut down.
        if self._refused:
            return
        # anyio's worker threads carry their loop; others are noticed when they call in.
        workers = [thread.name for thread in threading.enumerate() if getattr(thread, "loop", None) is self]
        for name in [*([self._intruder] if self._intruder else []), *workers]:
            self._refused = True
            raise ProtocolError(
                f"virtual time knows no threads, but {name!r} is one: do its work on the loop when in virtual time"
            )

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], R], *args: *Ts) -> asyncio.Future[R]:
        """Raise a :class:`~oppo.errors.ProtocolError`: executors need threads."""
        del executor, args
        raise ProtocolError(
            f"virtual time knows no threads, so {getattr(func, '__qualname__', func)!r} cannot run in an executor: "
            f"do its work on the loop when in virtual time"
        )

    def call_soon_threadsafe(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        """Call ``callback`` soon; a call from another thread is an error that the loop raises."""
        if threading.get_ident() != self._owner:
            # The loop raises the error, so that its caller gets it.
            self._intruder = threading.current_thread().name
        return super().call_soon_threadsafe(callback, *args, context=context)


_DAY = 24 * 3600  # the longest time, in seconds, that asyncio waits at once


class _IdleSelector(selectors.DefaultSelector):
    # Calls `pass_time` wherever the loop would sleep.
    def __init__(self, refuse_threads: Callable[[], None], pass_time: Callable[[float | None], None]) -> None:
        super().__init__()
        self._refuse_threads = refuse_threads
        self._pass_time = pass_time

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        self._refuse_threads()
        ready = super().select(0)
        if not ready and (timeout is None or timeout > 0):
            self._pass_time(timeout)
        return ready


class Job:
    # The work of a lane. Its position is its progress, in seconds of work: here the time.
    def __init__(self) -> None:
        self._now = running_loop().time  # what anyio.current_time returns, at a tenth of the price
        self._timer: asyncio.TimerHandle | None = None
        self._wake = anyio.Event()
        self._due = False

    @property
    def position(self) -> float:
        return self._now()

    def interrupt(self) -> None:
        self._wake.set()

    async def reach(self, position: float) -> bool:
        """Wait until a position is reached; return false if interrupted before."""
        self._wake, self._due = anyio.Event(), False
        self._arm(position)
        try:
            await self._wake.wait()
        finally:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        return self._due

    def _arm(self, position: float) -> None:
        self._timer = running_loop().call_at(position, self._arrive)

    def _arrive(self) -> None:
        self._due = True
        self._wake.set()


class Row(Protocol):
    paused: int  # tokens, while it is in no lane

    def due(self) -> int:
        """Return the number of tokens at which the next event of this row comes, at least one more than it has."""


RowT = TypeVar("RowT", bound=Row)


@dataclass(slots=True)
class Seat:
    # Its row had `made` tokens when the lane had made `since` decode steps.
    made: int
    since: int
    order: int  # ordinal of its joining, by which rows are attended to


class Lane(Generic[RowT]):
    # One engine, or one of several replicas.
    def __init__(
        self,
        seconds: Callable[[int, int], float],  # of a decode step, by its rows and the tokens of their responses
        attend: Callable[[Sequence[RowT]], None],  # the rows with an event after a step, in the order they joined
        count: Callable[[int], None],  # tokens made
        *,
        waits: Callable[[], bool],
        working: Callable[[], AbstractContextManager[Job]],  # while it has rows
    ) -> None:
        self._seconds = seconds
        self._attend = attend
        self._on_tokens = count
        self._waits = waits
        self._working = working
        self._seats: dict[RowT, Seat] = {}
        self._agenda: list[tuple[int, int, RowT]] = []  # by decode step, then by order
        self._joined = 0
        self.steps = 0
        self._context = 0  # tokens of all rows after these steps
        self._ends: list[float] = []  # positions at which the next steps end
        self._active = 0  # rows of the first of them
        self._paused = 0.0  # seconds before the next step that has no end yet
        self._planned = 0  # the step with the next event
        self._changes: list[Callable[[], None]] = []  # between this decode step and the next
        self._job: Job | None = None
        self.homes = 0  # rows that have begun here, and not ended

    def __contains__(self, row: object) -> bool:
        return row in self._seats

    def __len__(self) -> int:
        return len(self._seats)

    def made(self, row: RowT) -> int:
        seat = self._seats.get(row)
        if seat is None:
            return row.paused
        self.settle()
        return self._made(seat)

    def join(self, row: RowT) -> None:
        self.settle()
        seat = Seat(row.paused, self.steps + bool(self._ends), self._joined)
        self._joined += 1
        self._seats[row] = seat
        self._context += seat.made
        self._note(row, seat)
        self._replan()

    def leave(self, row: RowT) -> None:
        self.settle()
        seat = self._seats.pop(row)
        row.paused = self._made(seat)
        self._context -= row.paused
        self._active -= seat.since <= self.steps
        self._replan()

    def expect(self, row: RowT) -> None:
        self.settle()
        step = self._note(row, self._seats[row])
        if step < self._planned and self._job is not None:
            self._job.interrupt()

    def pause(self, seconds: float) -> None:
        self.settle()
        self._paused += seconds
        self._replan()

    def between_steps(self, change: Callable[[], None]) -> None:
        if self._job is None:
            change()
            return
        self.settle()
        self._changes.append(change)
        self._replan()

    async def run(self) -> None:
        if self._job is not None:
            return
        with self._working() as job:
            self._job = job
            try:
                while self._seats and not self._waits():
                    await self._advance(job)
            finally:
                self.settle()
                self._job, self._ends = None, []
                self._change()

    async def _advance(self, job: Job) -> None:
        # Until the next event, or until the rows or their readers' waits have changed.
        while self._agenda[0][-1] not in self._seats:
            heappop(self._agenda)
        self.settle()
        self._planned = self.steps + 1 if self._changes else self._agenda[0][0]
        if not await job.reach(self._end(self._planned, job)):
            return
        self._count(self._planned - self.steps)
        due: dict[RowT, None] = {}
        while self._agenda and self._agenda[0][0] <= self.steps:
            row = heappop(self._agenda)[-1]
            if row in self._seats:
                due[row] = None
        self._attend(sorted(due, key=lambda row: self._seats[row].order))
        for row in due:
            if row in self._seats:
                self._note(row, self._seats[row])
        self._change()

    def _change(self) -> None:
        changes, self._changes = self._changes, []
        for change in changes:
            change()

    def _note(self, row: RowT, seat: Seat) -> int:
        step = seat.since + row.due() - seat.made
        heappush(self._agenda, (step, self._joined, row))
        self._joined += 1
        return step

    def _made(self, seat: Seat) -> int:
        return seat.made + max(0, self.steps - seat.since)

    def _end(self, step: int, job: Job) -> float:
        if not self._ends:
            self._active = len(self._seats)
        while len(self._ends) < step - self.steps:
            ahead = len(self._ends)
            rows, context = len(self._seats), self._context
            if ahead:
                context += self._active + (ahead - 1) * rows
            begun = self._ends[-1] if ahead else job.position
            self._ends.append(begun + self._paused + self._seconds(rows, context))
            self._paused = 0.0
        return self._ends[step - self.steps - 1]

    def settle(self) -> None:
        if self._job is None or not self._ends or self.steps + 1 >= self._planned:
            return
        now, steps = self._job.position, 0
        while steps < len(self._ends) and self._ends[steps] < now and self.steps + steps + 1 < self._planned:
            steps += 1
        self._count(steps)

    def _count(self, steps: int) -> None:
        if not steps:
            return
        tokens = self._active + (steps - 1) * len(self._seats)
        del self._ends[:steps]
        self.steps += steps
        self._context += tokens
        self._on_tokens(tokens)
        self._active = len(self._seats)

    def _replan(self) -> None:
        # Only the step in progress stands, since the next ones have other rows.
        if self._job is not None and self._ends:
            del self._ends[1:]
            self._job.interrupt()
