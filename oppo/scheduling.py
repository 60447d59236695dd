"""Scheduling of calls that share a place: the priority of a call, and the time slice of calls that nothing waits for.

::

    Priority()            in the order of arrival
    Urgent()              before calls that are not urgent, which wait from its first call to its end
    Preemptible(better)   in the order of arrival, unless there is something better to do by then

A stage chooses the priority, a scorer passes it to its place (:meth:`oppo.placement.Hosted.at`), and the queue of calls
there applies it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Final, Self

from oppo.declared import AtLeastOne, Positive, validated


class Preempted(Exception):  # noqa: N818 - it says what happened
    """A preemptible call was not made, and had no effect, since its caller has something better to do."""


class Priority:
    """The priority of calls that are made in the order of arrival; inside :func:`urged`, that of its caller."""

    def claim(self, queue: CallQueue) -> bool:
        """Return whether a call that is about to join ``queue`` is urgent, and hold the queue if so."""
        urgent = _urgent.get()
        return urgent is not None and urgent.claim(queue)

    def preemption(self) -> Callable[[], bool]:
        """Return a function that says whether the call that is about to join a queue should be withdrawn."""
        return _never


IN_ORDER: Final = Priority()
"""The priority of a call for which none is given."""


class Urgent(Priority):
    """The priority of calls that a step waits for: they come before calls that are not urgent.

    No call in progress is interrupted, and urgent calls keep their order. The object is a context manager: from its
    first call in a place to the end of the context, calls that are not urgent wait there, so that none comes between
    two urgent ones. So every call that the body awaits in that place must be urgent. Outside of the context, calls with
    this priority are made in the order of arrival.
    """

    def __init__(self) -> None:
        self._entered = False
        self._held: set[CallQueue] = set()

    def claim(self, queue: CallQueue) -> bool:
        """Inside the context, hold ``queue`` until its end; return whether the context is open."""
        if self._entered:
            self._held.add(queue)
            queue.hold(self)
        return self._entered

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(self, *error: object) -> None:
        self._entered = False
        while self._held:
            self._held.pop().release(self)


_urgent = ContextVar[Urgent | None]("urgent", default=None)


@contextmanager
def urged(priority: Priority) -> Iterator[None]:
    """Make the calls of the body urgent if ``priority`` is, where they are given none of their own.

    So a scorer that takes no priority does not wait, in a place that it shares, for the one that waits for it.
    """
    token = _urgent.set(priority if isinstance(priority, Urgent) else None)
    try:
        yield
    finally:
        _urgent.reset(token)


class Preemptible(Priority):
    """The priority of calls that nothing waits for: the first is withdrawn if something better comes while it queues.

    A call that is withdrawn has no effect and raises :class:`Preempted`. Later calls with the same object complete what
    the first began, and are not withdrawn.

    Args:
        better: returns whether there is something better to do; polled from other threads until the call begins.
    """

    def __init__(self, better: Callable[[], bool]) -> None:
        self._better = better

    def preemption(self) -> Callable[[], bool]:
        """Return ``better`` to the first call, and a function that is always false to later ones."""
        better, self._better = self._better, _never
        return better


@dataclass(frozen=True, slots=True)
@validated()
class TimeSlice:
    """How long a call that nothing waits for should last: rollouts that finish meanwhile wait for its end.

    Attributes:
        seconds: the most that such a call should last.
        rise: seconds per token are estimated by the fastest call so far, times ``rise`` for each call since, because a
            call's own time may include waiting for others in its place.
    """

    seconds: Positive = 0.3
    rise: AtLeastOne = 1.1


DEFAULT_TIME_SLICE: Final = TimeSlice()
"""Tuned for scorers that share two CPU cores with a decoding actor."""

GPU_TIME_SLICE: Final = TimeSlice(0.05)
"""An estimate for a GPU, where as much is read in less time: about fifty decode steps."""


def _never() -> bool:
    return False


@dataclass(slots=True, eq=False)
class _Pending:
    """A queued call; ``withdraw`` reports to the caller that it was preempted."""

    urgent: bool
    begin: Callable[[], None]
    is_preempted: Callable[[], bool]
    withdraw: Callable[[], None]
    withdrawn: bool = False


class CallQueue:
    """Calls in the order of arrival, urgent ones first.

    While a holder holds the queue, only urgent calls leave it. Preempted calls are withdrawn whenever a call may leave.
    Any number of threads put and hold; one thread takes, once for each call put.
    """

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._pending: list[tuple[bool, int, _Pending]] = []
        self._arrived = 0
        self._holders: set[object] = set()
        self._may_be_held = True

    def put(self, begin: Callable[[], None], withdraw: Callable[[], None], priority: Priority) -> _Pending:
        """Queue a call, which holds the queue if it is urgent; if it is preempted, ``withdraw`` is called instead."""
        call = _Pending(priority.claim(self), begin, priority.preemption(), withdraw)
        with self._change:
            heappush(self._pending, (not call.urgent, self._arrived, call))
            self._arrived += 1
            self._change.notify()
        return call

    def take(self) -> Callable[[], None] | None:
        with self._change:
            self._change.wait_for(self._may_leave)
            call = heappop(self._pending)[-1]
            return None if call.withdrawn else call.begin

    def hold(self, holder: object) -> None:
        """Keep calls that are not urgent until ``holder`` releases the queue; idempotent."""
        with self._change:
            self._holders.add(holder)

    def release(self, holder: object) -> None:
        with self._change:
            self._holders.discard(holder)
            self._change.notify()

    def close(self) -> None:
        with self._change:
            self._may_be_held = False
            self._change.notify()

    def _may_leave(self) -> bool:
        for _, _, call in self._pending:
            if not call.withdrawn and call.is_preempted():
                call.withdrawn = True
                call.withdraw()
        if not self._pending:
            return False
        _, _, first = self._pending[0]
        return first.urgent or first.withdrawn or not (self._holders and self._may_be_held)
