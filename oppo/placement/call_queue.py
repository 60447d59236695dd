"""The calls that wait for a thread, in the order of their priorities."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from threading import Condition

from oppo.scheduling import Priority


@dataclass(slots=True, eq=False)
class _Pending:
    """A queued call.

    Attributes:
        begin: makes the call.
        is_preempted: whether the call should be given up.
        withdraw: reports to the caller that the call was given up.
    """

    urgent: bool
    begin: Callable[[], None]
    is_preempted: Callable[[], bool]
    withdraw: Callable[[], None]
    withdrawn: bool = False


class CallQueue:
    """Calls in the order of arrival, urgent ones first.

    While a holder holds the queue, only urgent calls leave it. Preempted calls are withdrawn whenever a call may leave.
    Thread-safe: any number of threads put and hold; one thread takes, once for each call put.
    """

    def __init__(self) -> None:
        self._change = Condition()
        self._pending: list[tuple[bool, int, _Pending]] = []
        self._arrived = 0
        self._holders: set[object] = set()
        self._may_be_held = True

    def put(self, begin: Callable[[], None], withdraw: Callable[[], None], priority: Priority) -> None:
        """Queue a call.

        Args:
            begin: makes the call.
            withdraw: called instead of ``begin`` if the call is preempted.
            priority: of the call; an urgent one holds the queue from now on.
        """
        call = _Pending(priority.claim(self), begin, priority.preemption(), withdraw)
        with self._change:
            heappush(self._pending, (not call.urgent, self._arrived, call))
            self._arrived += 1
            self._change.notify()

    def take(self) -> Callable[[], None] | None:
        """Wait for the next call and return its ``begin``; ``None`` if that call was preempted."""
        with self._change:
            self._change.wait_for(self._may_leave)
            call = heappop(self._pending)[-1]
            return None if call.withdrawn else call.begin

    def hold(self, holder: object) -> None:
        """Keep calls that are not urgent until ``holder`` releases the queue; idempotent."""
        with self._change:
            self._holders.add(holder)

    def release(self, holder: object) -> None:
        """End the hold of ``holder``."""
        with self._change:
            self._holders.discard(holder)
            self._change.notify()

    def close(self) -> None:
        """Let all pending calls leave, held or not."""
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
