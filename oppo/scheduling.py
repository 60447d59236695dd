"""How calls that share a place are scheduled: the priority of a call, and how long one should last that nobody awaits.

::

    Priority()            in the order of arrival
    Urgent()              before all that are not; from its first call to its end, those wait
    Preemptible(better)   in the order of arrival, or not at all once there is something better to do

A stage chooses the priority, a scorer hands it to its place (:meth:`oppo.placement.Hosted.at`), and the queue of calls
there acts on it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Protocol, Self

from oppo.declared import require_declared


class Preempted(Exception):  # noqa: N818 - it says what happened
    """A preemptible call was not made, since its caller has something better to do; nothing of it was done."""


class Holdable(Protocol):
    """A queue of calls that can be kept for urgent ones."""

    def hold(self, holder: object) -> None:
        """Keep calls that are not urgent until ``holder`` releases the queue; idempotent."""

    def release(self, holder: object) -> None:
        """Take back what ``holder`` held."""


class Priority:
    """The priority of calls that are made in the order of arrival."""

    def claim(self, queue: Holdable) -> bool:
        """Return whether a call that is about to join ``queue`` is urgent, and hold the queue if so."""
        del queue
        return False

    def preemption(self) -> Callable[[], bool]:
        """Return what tells whether the call that is about to join a queue should be given up."""
        return _never


IN_ORDER: Final = Priority()
"""The priority of a call for which none is given."""


class Urgent(Priority):
    """The priority of what a step waits for: it comes before calls that are not urgent.

    No call in progress is interrupted, and urgent calls keep their order among them. It is a context manager: from its
    first call in a place to the end of the context, calls that are not urgent wait there, so that none comes between
    two urgent calls that follow one another. So everything that the body waits for in that place must be urgent too.
    Before and after the context, calls with this priority are made in the order of arrival.

    Example:
        >>> with Urgent() as priority:
        ...     isinstance(priority, Priority)
        True
    """

    def __init__(self) -> None:
        self._entered = False
        self._held: set[Holdable] = set()

    def claim(self, queue: Holdable) -> bool:
        """Hold ``queue`` until the context ends; return whether that is still to come."""
        if self._entered:
            self._held.add(queue)
            queue.hold(self)
        return self._entered

    def __enter__(self) -> Self:
        self._entered = True
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._entered = False
        while self._held:
            self._held.pop().release(self)


class Preemptible(Priority):
    """The priority of what nobody waits for: its first call is given up while it queues if something better comes up.

    What is given up is not done, and raises :class:`Preempted`. Later calls with the same object complete what the
    first has begun, and are not given up.

    Args:
        better: returns whether there is something better to do; asked now and then, from other threads, until the
            call begins.
    """

    def __init__(self, better: Callable[[], bool]) -> None:
        self._better = better

    def preemption(self) -> Callable[[], bool]:
        """Return ``better`` to the first call, and to later ones what is always false."""
        better, self._better = self._better, _never
        return better


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """How long a call that nobody waits for should last: whatever finishes meanwhile waits for its end.

    Attributes:
        seconds: that such a call should last at most.
        rise: the estimated seconds per token are those of the fastest call so far, times this for each call since,
            as a call may have waited for others in its place.
    """

    seconds: float = 0.3
    rise: float = 1.1

    def __post_init__(self) -> None:
        require_declared(self)
        if self.seconds <= 0:
            raise ValueError(f"seconds of a TimeSlice must be more than 0, not {self.seconds}")
        if self.rise < 1:
            raise ValueError(f"rise of a TimeSlice must be at least 1, not {self.rise}")


DEFAULT_TIME_SLICE: Final = TimeSlice()
"""Tuned for scorers that share two CPU cores with a decoding actor."""


def _never() -> bool:
    return False
