"""Rows that a fake engine decodes together, a token of each in every decode step.

Time passes from event to event, not from token to token: between two decode steps in which a row ends, reaches a turn,
or has what its reader waits for, the steps are only counted. So a lane costs what its events cost, however long the
rows are and however many.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Generic, Protocol, TypeVar

import anyio

from oppo.testing.device import Device, Job


class Row(Protocol):
    """A response that is being decoded."""

    parked: int
    """Tokens, while it is in no lane."""

    def due(self) -> int:
        """Return the number of tokens at which the next event of this row comes, at least one more than it has."""


R = TypeVar("R", bound=Row)


@dataclass(slots=True)
class Seat:
    """The place of a row in a lane: it had ``made`` tokens when the lane had made ``since`` decode steps.

    Attributes:
        order: ordinal of its joining, by which rows are attended to.
    """

    made: int
    since: int
    order: int


class Lane(Generic[R]):
    """One engine, or one of several replicas.

    Args:
        seconds: of a decode step of so many rows with so many tokens in their responses.
        attend: called with the rows that have an event after a decode step, in the order of their joining.
        count: called with the number of tokens made.
        waits: whether no decode step begins now.
        device: that it works on; its own by default.
        static: whether a row keeps its place in the decode step when it has ended, padded to the longest one, as in a
            batch that is decoded to its end.

    Attributes:
        homes: rows that have begun here, and not ended.
        peak_rows, peak_tokens: most rows that it had at once, and most tokens in their responses.
    """

    def __init__(
        self,
        seconds: Callable[[int, int], float],
        attend: Callable[[Sequence[R]], None],
        count: Callable[[int], None],
        *,
        waits: Callable[[], bool] = lambda: False,
        device: Device | None = None,
        static: bool = False,
    ) -> None:
        self._seconds = seconds
        self._attend = attend
        self._on_tokens = count
        self._waits = waits
        self._device = device
        self._static = static
        self._seats: dict[R, Seat] = {}
        self._agenda: list[tuple[int, int, R]] = []  # by decode step, then by order
        self._joined = 0
        self._steps = 0
        self._context = 0  # tokens of all rows after these steps
        self._longest = 0  # most tokens of any row less the steps made; counts for a static lane only
        self._places = 0  # rows that had a place since decoding began
        self._ends: list[float] = []  # positions at which the next steps end
        self._active = 0  # rows of the first of them
        self._paused = 0.0  # seconds before the next step that has no end yet
        self._planned = 0  # the step with the next event
        self._changes: list[Callable[[], None]] = []  # between this decode step and the next
        self._job: Job | None = None
        self._worked = 0.0  # seconds at work, before the present work
        self._begun = 0.0
        self.homes = 0
        self.peak_rows = self.peak_tokens = 0

    def __contains__(self, row: object) -> bool:
        return row in self._seats

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def busy(self) -> float:
        """Seconds in which it made decode steps."""
        return self._worked + (0.0 if self._job is None else anyio.current_time() - self._begun)

    def made(self, row: R) -> int:
        """Return the tokens of a row by now."""
        seat = self._seats.get(row)
        if seat is None:
            return row.parked
        self.settle()
        return self._made(seat)

    def join(self, row: R) -> None:
        """Decode a row as well, from the next decode step on."""
        self.settle()
        seat = Seat(row.parked, self._steps + bool(self._ends), self._joined)
        self._joined += 1
        self._seats[row] = seat
        self._context += seat.made
        self._longest = max(self._longest, seat.made - seat.since) if self._places else seat.made - seat.since
        self._places += 1
        self.peak_rows = max(self.peak_rows, len(self._seats))
        self._note(row, seat)
        self._replan()

    def leave(self, row: R) -> None:
        """Decode a row no longer."""
        self.settle()
        seat = self._seats.pop(row)
        row.parked = self._made(seat)
        self._context -= row.parked
        self._active -= seat.since <= self._steps
        self._replan()

    def expect(self, row: R) -> None:
        """Take note that the next event of a row may come sooner than it would have."""
        self.settle()
        step = self._note(row, self._seats[row])
        if step < self._planned and self._job is not None:
            self._job.interrupt()

    def pause(self, seconds: float) -> None:
        """Let the next decode step begin so much later, for something else that the engine does first."""
        self.settle()
        self._paused += seconds
        self._replan()

    def between_steps(self, change: Callable[[], None]) -> None:
        """Call ``change`` after the decode step in progress, or now."""
        if self._job is None:
            change()
            return
        self.settle()
        self._changes.append(change)
        self._replan()

    def clear(self) -> None:
        """Forget the places of rows that have ended."""
        self._places = len(self._seats)

    async def run(self) -> None:
        """Make decode steps until no row is left, or they wait; return at once if another task does."""
        if self._job is not None:
            return
        with nullcontext(Job("decode")) if self._device is None else self._device.job("decode") as job:
            self._job, self._begun = job, anyio.current_time()
            try:
                while self._seats and not self._waits():
                    await self._advance(job)
            finally:
                self.settle()
                self._worked = self.busy
                self._job, self._ends = None, []
                self._change()

    async def _advance(self, job: Job) -> None:
        """Pass the time until the next event, or until the rows or what they are waited for have changed."""
        while self._agenda[0][-1] not in self._seats:
            heappop(self._agenda)
        self.settle()
        self._planned = self._steps + 1 if self._changes else self._agenda[0][0]
        if not await job.reach(self._end(self._planned, job)):
            return
        self._count(self._planned - self._steps)
        due: dict[R, None] = {}
        while self._agenda and self._agenda[0][0] <= self._steps:
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

    def _note(self, row: R, seat: Seat) -> int:
        step = seat.since + row.due() - seat.made
        heappush(self._agenda, (step, self._joined, row))
        self._joined += 1
        return step

    def _made(self, seat: Seat) -> int:
        return seat.made + max(0, self._steps - seat.since)

    def _end(self, step: int, job: Job) -> float:
        """Return the position at which a decode step ends."""
        if not self._ends:
            self._active = len(self._seats)
        while len(self._ends) < step - self._steps:
            ahead = len(self._ends)
            rows, context = len(self._seats), self._context
            if ahead:
                context += self._active + (ahead - 1) * rows
            if self._static:
                rows, context = self._places, self._places * (self._longest + self._steps + ahead)
            begun = self._ends[-1] if ahead else job.position
            self._ends.append(begun + self._paused + self._seconds(rows, context))
            self._paused = 0.0
        return self._ends[step - self._steps - 1]

    def settle(self) -> None:
        """Count the decode steps that have ended before now."""
        if self._job is None or not self._ends:
            return
        now, steps = self._job.position, 0
        while steps < len(self._ends) and self._ends[steps] < now and self._steps + steps + 1 < self._planned:
            steps += 1
        self._count(steps)

    def _count(self, steps: int) -> None:
        if not steps:
            return
        tokens = self._active + (steps - 1) * len(self._seats)
        del self._ends[:steps]
        self._steps += steps
        self._context += tokens
        self.peak_tokens = max(self.peak_tokens, self._context)
        self._on_tokens(tokens)
        self._active = len(self._seats)

    def _replan(self) -> None:
        """Let only the step in progress stand, since the next ones have other rows."""
        if self._job is not None and self._ends:
            del self._ends[1:]
            self._job.interrupt()
