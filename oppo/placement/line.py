"""Where calls wait for their turn in a thread."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from threading import Condition


@dataclass(slots=True, eq=False)
class Waiting:
    """A call that waits.

    Attributes:
        urgent: it comes before those that are not.
        begin: makes it.
        gives_way: whether it should not be made any more; asked now and then, until it is made.
        withdraw: tells whoever waits for it that it will not be made.
    """

    urgent: bool
    begin: Callable[[], None]
    gives_way: Callable[[], bool]
    withdraw: Callable[[], None]
    gone: bool = False


class Line:
    """Calls in the order in which they came, but for urgent ones, which come first.

    While somebody holds the line, only urgent calls leave it. Whenever one may leave, those give way that should. Safe
    for threads: any number put and hold, one takes, as often as calls are put.
    """

    def __init__(self) -> None:
        self._change = Condition()
        self._waiting: list[tuple[bool, int, Waiting]] = []
        self._came = 0
        self._holders: set[object] = set()
        self._may_be_held = True

    def put(self, call: Waiting) -> None:
        """Let a call wait for its turn."""
        with self._change:
            heappush(self._waiting, (not call.urgent, self._came, call))
            self._came += 1
            self._change.notify()

    def take(self) -> Callable[[], None] | None:
        """Return what makes the call whose turn it is, waiting until there is one; ``None`` if it has given way."""
        with self._change:
            self._change.wait_for(self._may_go_on)
            call = heappop(self._waiting)[-1]
            return None if call.gone else call.begin

    def hold(self, holder: object) -> None:
        """Keep calls that are not urgent until ``holder`` releases the line; idempotent."""
        with self._change:
            self._holders.add(holder)

    def release(self, holder: object) -> None:
        """Take back what ``holder`` held."""
        with self._change:
            self._holders.discard(holder)
            self._change.notify()

    def close(self) -> None:
        """Let all calls go that wait here, whoever holds the line."""
        with self._change:
            self._may_be_held = False
            self._change.notify()

    def _may_go_on(self) -> bool:
        self._give_way()
        if not self._waiting:
            return False
        _, _, first = self._waiting[0]
        return first.urgent or first.gone or not (self._holders and self._may_be_held)

    def _give_way(self) -> None:
        for _, _, call in self._waiting:
            if not call.gone and call.gives_way():
                call.gone = True
                call.withdraw()
