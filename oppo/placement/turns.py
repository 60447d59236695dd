"""What a task can say of its calls in a place that it shares: that they come first, or that they give way.

Both are said around calls, whoever makes them, and reach the place with the task's context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from oppo.placement.line import Line


class GaveWay(Exception):  # noqa: N818 - it says what happened
    """A call was not made, since its caller has something better to do by now; nothing of it was done."""


class Precedence:
    """What a task has that is :func:`ahead` of others: it holds every line in which it has put a call."""

    def __init__(self) -> None:
        self.lasts = True
        self._lines: set[Line] = set()

    def hold(self, line: Line) -> None:
        """Hold ``line`` as long as this lasts."""
        self._lines.add(line)
        line.hold(self)

    def end(self) -> None:
        """Release all lines; a task that was left behind with this is like others from now on."""
        self.lasts = False
        for line in self._lines:
            line.release(self)


_precedence: ContextVar[Precedence | None] = ContextVar("precedence", default=None)


def _nothing() -> bool:
    return False


_better: ContextVar[Callable[[], bool]] = ContextVar("better", default=_nothing)


@contextmanager
def ahead() -> Iterator[None]:
    """Let calls of this task, while it lasts, come before those of others that wait in the same place.

    For what a step waits for. No call in progress is interrupted, and such calls keep their order among them. From its
    first call in a place to its end, calls of others wait there, so that none comes between two calls that follow one
    another; only what is ahead itself goes on. So nothing is to be waited for here that needs a call of others.
    """
    mine = Precedence()
    before = _precedence.set(mine)
    try:
        yield
    finally:
        _precedence.reset(before)
        mine.end()


@contextmanager
def giving_way(better: Callable[[], bool]) -> Iterator[None]:
    """Let the first call of this task give way, while it waits for its turn, when there is something better to do.

    For what nobody waits for. What gives way is not done, and raises :class:`GaveWay` out of the call.

    Args:
        better: whether there is; asked now and then, from other threads, until the call begins.
    """
    before = _better.set(better)
    try:
        yield
    finally:
        _better.reset(before)


def precedence() -> Precedence | None:
    """Return what this task has if it is ahead of others."""
    mine = _precedence.get()
    return mine if mine is not None and mine.lasts else None


def courtesy() -> Callable[[], bool]:
    """Return what says whether the call that this task is about to make should give way; later ones never do."""
    better = _better.get()
    _better.set(_nothing)
    return better
