"""Simulated work in bulk: jobs on devices that they share, rows that are decoded together, scorers that batch.

Time passes from event to event. A decode lane's next event is the step in which a row ends, a chunk is full or a row
joins; the steps between are only counted, by a closed form: with m rows and X tokens of context ::

    n steps    n (step + row m + context X) + context m n (n - 1) / 2

No task, channel or token is simulated, so a run costs as much as it has rows, chunks and calls of scorers.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from operator import attrgetter
from typing import Final

from oppo.errors import DeadlockError
from oppo.events import Prompt
from oppo.scheduling import DEFAULT_TIME_SLICE
from oppo.simulate.costs import Decoder, Reader
from oppo.simulate.engine import Interference

_END: Final = attrgetter("end")


@dataclass(slots=True, eq=False)
class Job:
    # Work that takes `end - now` more seconds of the clock; `slowdown`: beside other kinds of work on its device
    kind: str
    over: Callable[[], None]  # called at its end
    end: float = 0.0
    slowdown: float = 1.0
    mark: float = 0.0  # the time up to which its work is counted


class Device:
    """Hardware that several kinds of work share; work of one kind does not interfere with itself."""

    def __init__(self, clock: Clock, interference: Interference) -> None:
        self._clock = clock
        self._interference = interference
        self._jobs: list[Job] = []
        self.done: dict[str, float] = {}

    def begin(self, job: Job, seconds: float) -> None:
        job.mark = self._clock.now
        same = next((each for each in self._jobs if each.kind == job.kind), None)
        job.slowdown = 1.0 if same is None else same.slowdown
        job.end = job.mark + seconds * job.slowdown
        self._jobs.append(job)
        self._clock.jobs.append(job)
        if same is None:
            self._changed()

    def reset(self, job: Job, seconds: float) -> None:
        """Let a job have so many seconds of work before it."""
        self._count(job)
        job.end = self._clock.now + seconds * job.slowdown

    def left(self, job: Job) -> float:
        return (job.end - self._clock.now) / job.slowdown

    def finish(self, job: Job) -> None:
        self._count(job)
        self._jobs.remove(job)
        self._clock.jobs.remove(job)
        if not any(each.kind == job.kind for each in self._jobs):
            self._changed()

    def settled(self) -> dict[str, float]:
        """Return the seconds of work done by now, by kind."""
        for job in self._jobs:
            self._count(job)
        return dict(self.done)

    def _count(self, job: Job) -> None:
        now = self._clock.now
        self.done[job.kind] = self.done.get(job.kind, 0.0) + (now - job.mark) / job.slowdown
        job.mark = now

    def _changed(self) -> None:
        kinds = dict.fromkeys(each.kind for each in self._jobs)
        slowed = {kind: 1 + sum(self._interference(kind, other) for other in kinds if other != kind) for kind in kinds}
        for job in self._jobs:
            if job.slowdown != slowed[job.kind]:
                left = self.left(job)
                self._count(job)
                job.slowdown = slowed[job.kind]
                job.end = self._clock.now + left * job.slowdown


class Clock:
    """Virtual time: it jumps to the next end of a job."""

    def __init__(self) -> None:
        self.now = 0.0
        self.jobs: list[Job] = []
        self.then: dict[Callable[[], None], None] = {}  # called once when nothing more happens now

    def after(self, seconds: float, over: Callable[[], None]) -> None:
        """Call ``over`` in so many seconds."""

        def end() -> None:
            self.jobs.remove(job)
            over()

        job = Job("", end, self.now + seconds)
        self.jobs.append(job)

    def advance(self) -> None:
        """Handle the next event.

        Raises:
            DeadlockError: there is none.
        """
        job = min(self.jobs, key=_END, default=None)
        if self.then and (job is None or job.end > self.now):
            then, self.then = self.then, {}
            for each in then:
                each()
        elif job is None:
            raise DeadlockError("a simulated step waits for work that nobody does")
        else:
            self.now = max(self.now, job.end)
            job.over()


@dataclass(slots=True, eq=False)
class Row:
    """A rollout: ``made`` tokens when its lane had made ``since`` steps, of which ``sent`` have gone to the scorers."""

    prompt: Prompt
    length: int
    scorers: int
    made: int = 0
    since: int = 0
    sent: int = -1  # -1: not even its prompt
    home: Lane | None = None
    load: int = -1  # of the weights that computed its context
    runs: list[tuple[int, int]] = field(default_factory=list)  # from this token on, this version
    read: list[int] = field(default_factory=list)  # tokens that each scorer has read, prompt included

    def __post_init__(self) -> None:
        self.read = [0] * self.scorers

    def follow(self, version: int, made: int) -> None:
        if self.runs and self.runs[-1][0] == made:
            self.runs.pop()
        if not self.runs or self.runs[-1][1] != version:
            self.runs.append((made, version))

    @property
    def version_sum(self) -> float:
        """The versions of its tokens, added up."""
        ends = [start for start, _ in self.runs[1:]] + [self.length]
        return sum((end - start) * version for (start, version), end in zip(self.runs, ends, strict=True))


class Lane:
    """One replica: its rows, decoded together; ``attend`` gets the rows that end and those with a full chunk."""

    def __init__(
        self,
        clock: Clock,
        device: Device,
        costs: Decoder,
        prompt: int,
        attend: Callable[[Lane, list[Row], list[Row]], None],
        *,
        static: bool,
    ) -> None:
        self._clock = clock
        self._device = device
        self._costs = costs
        self._prompt = prompt
        self._attend = attend
        self._static = static
        self._job = Job("decode", self._arrive)
        self.running = False
        self.rows: dict[Row, None] = {}
        self.homes = 0  # rows that have begun here, and not ended
        self.chunk = 0  # tokens after which a row's reader is attended to; 0: never
        self.steps = 0
        self._context = 0  # tokens of all rows after these steps
        self._ends: list[tuple[int, int, Row]] = []  # the step with which each row ends
        self._full: list[tuple[int, int]] = []  # the step with which rows that joined at another have a full chunk
        self._joining: list[Row] = []
        self._changes: list[Callable[[], None]] = []
        self._plan = 0  # decode steps to the next event
        self._pause = 0.0  # seconds before the next plan
        self._held = 0.0  # and before the first step of this one
        self._planned = 0.0  # seconds of work of the plan
        self._places = self._longest = 0  # of a static lane
        self._begun = 0.0
        self._worked = 0.0
        self.peak_rows = self.peak_tokens = self.places = 0  # places: of rows in all decode steps
        self.pauses = 0.0

    @property
    def busy(self) -> float:
        return self._worked + (self._clock.now - self._begun if self.running else 0.0)

    def join(self, row: Row, reading: float) -> None:
        """Decode this row from the next step on, after so many seconds in which its context is read."""
        self._joining.append(row)
        self.pause(reading)

    def pause(self, seconds: float) -> None:
        self._pause += seconds
        self.pauses += seconds

    def between_steps(self, change: Callable[[], None]) -> None:
        if self.running:
            self._changes.append(change)
            self.start()
        else:
            change()

    def start(self) -> None:
        """Begin, or let what has changed come after the step in progress."""
        if self.running:
            made = self._made_steps() + 1
            if made < self._plan:
                worked = self._planned - self._device.left(self._job)
                self._plan, self._planned = made, self._held + self._cost(made)
                self._device.reset(self._job, max(0.0, self._planned - worked))
            return
        self._places, self._longest = 0, 0
        self._take()
        if self.rows:
            self.running, self._begun = True, self._clock.now
            self._device.begin(self._job, self._next())

    def stop(self) -> list[Row]:
        """Stop at once, without the step in progress; return the rows."""
        if self.running:
            self._settle(self._made_steps())
            self._leave()
        rows = [*self.rows, *self._joining]
        for row in self.rows:
            row.made += self.steps - row.since
        self.rows.clear()
        self._joining.clear()
        self._ends.clear()
        self._full.clear()
        self._context = 0
        return rows

    def made(self, row: Row) -> int:
        return row.made + self.steps - row.since if row in self.rows else row.made

    def live(self) -> list[tuple[Row, int]]:
        """Return its rows, those that are about to join included, and the tokens that each has."""
        return [*((row, self.made(row)) for row in self.rows), *((row, row.made) for row in self._joining)]

    def _leave(self) -> None:
        self._device.finish(self._job)
        self._worked = self.busy
        self.running = False
        changes, self._changes = self._changes, []
        for change in changes:
            change()

    def _take(self) -> None:
        if not self._joining:
            return
        for row in self._joining:
            row.since = self.steps
            self.rows[row] = None
            heappush(self._ends, (self.steps + row.length - row.made, row.prompt.rollout, row))
            self._context += row.made
            self._longest = max(self._longest, row.made - self.steps) if self._places else row.made - self.steps
            self._places += 1
        if self.chunk:
            heappush(self._full, (self.steps + self.chunk, self.steps))
        self._joining.clear()
        self.peak_rows = max(self.peak_rows, len(self.rows))

    def _next(self) -> float:
        # Plan up to the next event; return the seconds of work.
        self._plan = self._ends[0][0] - self.steps
        if self._full:
            self._plan = min(self._plan, self._full[0][0] - self.steps)
        self._held, self._pause = self._pause, 0.0
        self._planned = self._held + self._cost(self._plan)
        return self._planned

    def _cost(self, steps: int) -> float:
        costs, rows, context = self._costs, len(self.rows), self._context
        if self._static:
            rows, context = self._places, self._places * (self._longest + self.steps)
        first = costs.step + costs.row * rows + costs.context * (context + rows * (self._prompt + 0.5))
        rise = costs.context * rows
        if first >= costs.floor:
            return steps * first + rise * steps * (steps - 1) / 2
        short = min(steps, int((costs.floor - first) / rise) + 1 if rise else steps)  # steps below the floor
        more = steps - short
        return short * costs.floor + more * (first + rise * short) + rise * more * (more - 1) / 2

    def _made_steps(self) -> int:
        # Whole steps of the plan that are over.
        worked = self._planned - self._device.left(self._job) - self._held
        if worked <= 0:
            return 0
        return bisect_left(range(1, self._plan), worked * (1 - 1e-12), key=self._cost)

    def _settle(self, steps: int) -> None:
        rows = len(self.rows)
        self.steps += steps
        self._context += steps * rows
        self.places += steps * (self._places if self._static else rows)
        self.peak_tokens = max(self.peak_tokens, self._context)

    def _arrive(self) -> None:
        self._settle(self._plan)
        now, ended, grown = self.steps, list[Row](), list[Row]()
        while self._ends and self._ends[0][0] == now:
            row = heappop(self._ends)[-1]
            row.made = row.length
            del self.rows[row]
            self._context -= row.length
            ended.append(row)
        while self._full and self._full[0][0] == now:
            joined = heappop(self._full)[1]
            found = [row for row in self.rows if row.since == joined]
            if found:
                heappush(self._full, (now + self.chunk, joined))
                grown += found
        self._plan = 0
        if ended or grown:
            self._attend(self, ended, grown)
        if not self.running:  # the step was cut
            return
        changes, self._changes = self._changes, []
        for change in changes:
            change()
        self._take()
        if self.rows:
            self._device.reset(self._job, self._next())
        else:
            self._leave()


@dataclass(slots=True, eq=False)
class Backlog:
    """What a scorer has to do in a step."""

    unread: dict[Row, int] = field(default_factory=dict)  # rows that have grown, and the tokens that were sent of each
    finished: list[Row] = field(default_factory=list)
    ended: bool = False  # whether nothing more comes
    over: bool = False  # whether all is done
    calls: list[tuple[float, float]] = field(default_factory=list)
    last: float = 0.0  # when it has answered, the last time
    answered: int = 0


@dataclass(slots=True, eq=False)
class Call:
    scorer: Scorer
    backlog: Backlog
    work: Sequence[tuple[Row, int]]  # rows that are read, and up to where
    finished: Sequence[Row]
    seconds: float
    at: float  # when it was queued


class Place:
    """Makes one call at a time: those for finished rows first, before which others are withdrawn."""

    def __init__(self) -> None:
        self._queue: list[Call] = []
        self._busy = False

    def put(self, call: Call) -> None:
        self._queue.append(call)
        self.next()

    def end(self) -> None:
        self._busy = False

    def next(self) -> None:
        while self._queue and not self._busy:
            call = next((each for each in self._queue if not each.finished and each.backlog.finished), None)
            if call is not None:
                self._queue.remove(call)
                call.scorer.withdrawn()
                continue
            call = next((each for each in self._queue if each.finished), self._queue[0])
            self._queue.remove(call)
            self._busy = True
            call.scorer.begin(call)


class Scorer:
    """A scorer in the steps of a run, one after the other: finished rows first, then what the others have grown by."""

    def __init__(
        self,
        index: int,  # among the scorers
        reader: Reader,
        clock: Clock,
        device: Device,
        place: Place,
        prompt: int,
        whole: Callable[[Sequence[Row]], float] | None,  # seconds for finished rows, of one that reads nothing ahead
        done: Callable[[], None],  # called when it has answered, or a step is over
    ) -> None:
        self.reads = whole is None
        self._index = index
        self._reader = reader
        self._clock = clock
        self._device = device
        self._place = place
        self._prompt = prompt
        self._whole = whole
        self._done = done
        self._backlogs: list[Backlog] = []
        self._busy = False
        self._pace = 0.0  # seconds for each token, of the fastest call

    def begins(self) -> Backlog:
        """A step begins; return its backlog."""
        backlog = Backlog()
        self._backlogs.append(backlog)
        return backlog

    def wake(self) -> None:
        while not self._busy and self._backlogs:
            backlog = self._backlogs[0]
            if backlog.finished:
                self._put(self._urgent(backlog))
            elif backlog.unread:
                self._put(self._ahead(backlog))
            elif backlog.ended:
                del self._backlogs[0]
                backlog.over = True
                self._done()
            else:
                return

    def forget(self, row: Row) -> None:
        row.read[self._index] = 0

    def withdrawn(self) -> None:
        self._busy = False
        self.wake()

    def begin(self, call: Call) -> None:
        job = Job("score", lambda: self._over(call, job))
        self._device.begin(job, call.seconds)

    def _put(self, call: Call) -> None:
        self._busy = True
        self._place.put(call)

    def _urgent(self, backlog: Backlog) -> Call:
        finished, backlog.finished = backlog.finished, []
        work = [(row, self._prompt + row.length) for row in finished]
        for row in finished:
            backlog.unread.pop(row, None)
        if self._whole is not None:
            seconds = self._whole(finished)
        else:
            seconds = self._seconds(work) + self._reader.answer * len(finished)
        return Call(self, backlog, work, finished, seconds, self._clock.now)

    def _ahead(self, backlog: Backlog) -> Call:
        budget = DEFAULT_TIME_SLICE.seconds / self._pace if self._pace else math.inf
        work: list[tuple[Row, int]] = []
        for row, sent in backlog.unread.items():
            stop = self._prompt + sent
            budget -= stop - row.read[self._index]
            if work and budget < 0:
                break
            work.append((row, stop))
        return Call(self, backlog, work, (), self._seconds(work), self._clock.now)

    def _seconds(self, work: Sequence[tuple[Row, int]]) -> float:
        passes, index = self._reader.passes, self._index
        read = [(row.read[index], stop) for row, stop in work if stop > row.read[index]]
        return (self._reader.call if read else 0.0) + sum(passes.reading(*each) for each in read)

    def _over(self, call: Call, job: Job) -> None:
        self._device.finish(job)
        backlog, now, tokens = call.backlog, self._clock.now, 0
        for row, stop in call.work:
            tokens += stop - row.read[self._index]
            row.read[self._index] = stop
            sent = backlog.unread.pop(row, -1)
            if self._prompt + sent > stop:
                backlog.unread[row] = sent  # behind all others
        if tokens and self.reads:
            pace = (now - call.at) / tokens
            self._pace = min(pace, DEFAULT_TIME_SLICE.rise * self._pace) if self._pace else pace
        backlog.calls.append((call.at, now))
        self._busy = False
        self._place.end()
        if call.finished:
            backlog.last, backlog.answered = now, backlog.answered + len(call.finished)
            self._done()
        self.wake()
        self._place.next()
