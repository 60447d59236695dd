"""Virtual time: an event loop whose clock jumps to the next timer when every task waits.

A test calls an async function through :func:`run_virtual` and asserts exact times; it needs no fixture, and a function
under Hypothesis can do the same for each example::

    def test_a_step_takes_as_long_as_its_slowest_stage() -> None:
        assert run_virtual(main) == 2.5

When every task waits and no timer is left, the loop raises :class:`oppo.errors.DeadlockError` out of whatever runs it.
Threads are refused: their work has no virtual duration.
"""

from __future__ import annotations

import asyncio
import heapq
import inspect
import math
import selectors
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from contextvars import Context
from typing import TypeVar, TypeVarTuple

import anyio

from oppo.errors import DeadlockError, ProtocolError

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
    if inspect.iscoroutine(main):
        main.close()
        raise ProtocolError("run_virtual calls an async function itself: give it main, not main()")
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
        return self._clock

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
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
