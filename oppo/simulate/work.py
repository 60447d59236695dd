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
from oppo.simulate.profile import Decoder, Interference, Reader

_END: Final = attrgetter("end")


@dataclass(slots=True, eq=False)
class Job:
    kind: str
    over: Callable[[], None]  # called at its end
    end: float = 0.0  # on the clock, as long as nothing else begins or ends on its device


class Device:
    """Hardware that several kinds of work share; work of one kind does not interfere with itself."""

    def __init__(self, clock: Clock, interference: Interference) -> None:
        self._clock = clock
        self._interference = interference
        self._jobs: dict[str, list[Job]] = {}  # by kind
        self._slowdowns: dict[str, float] = {}  # of each kind, beside the others
        self._done: dict[str, float] = {}
        self._since = 0.0

    def begin(self, job: Job, seconds: float) -> None:
        self._count()
        jobs = self._jobs.setdefault(job.kind, [])
        jobs.append(job)
        self._clock.jobs.append(job)
        if len(jobs) == 1:
            self._change()
        job.end = self._clock.now + seconds * self._slowdowns[job.kind]

    def reset(self, job: Job, seconds: float) -> None:
        job.end = self._clock.now + seconds * self._slowdowns[job.kind]

    def left(self, job: Job) -> float:
        return (job.end - self._clock.now) / self._slowdowns[job.kind]

    def finish(self, job: Job) -> None:
        self._count()
        jobs = self._jobs[job.kind]
        jobs.remove(job)
        self._clock.jobs.remove(job)
        if not jobs:
            del self._jobs[job.kind]
            self._change()

    def done(self) -> dict[str, float]:
        self._count()
        return dict(self._done)

    def _count(self) -> None:
        now, passed = self._clock.now, self._clock.now - self._since
        if passed:
            for kind, jobs in self._jobs.items():
                self._done[kind] = self._done.get(kind, 0.0) + len(jobs) * passed / self._slowdowns[kind]
            self._since = now

    def _change(self) -> None:
        now, kinds, before = self._clock.now, tuple(self._jobs), self._slowdowns
        self._slowdowns = {
            kind: 1 + sum(self._interference(kind, other) for other in kinds if other != kind) for kind in kinds
        }
        for kind, jobs in self._jobs.items():
            if (times := self._slowdowns[kind] / before.get(kind, 1.0)) != 1:
                for job in jobs:
                    job.end = now + (job.end - now) * times


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.jobs: list[Job] = []
        self.then: dict[Callable[[], None], None] = {}  # called once when nothing more happens now

    def after(self, seconds: float, over: Callable[[], None]) -> None:
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
    read: list[int]  # tokens that each scorer has read, prompt included
    made: int = 0
    since: int = 0
    sent: int = -1  # -1: not even its prompt
    home: Lane | None = None
    load: int = -1  # of the weights that computed its context
    runs: list[tuple[int, int]] = field(default_factory=list)  # from this token on, this version

    def follow(self, version: int, made: int) -> None:
        if self.runs and self.runs[-1][0] == made:
            self.runs.pop()
        if not self.runs or self.runs[-1][1] != version:
            self.runs.append((made, version))

    @property
    def version_sum(self) -> float:
        if len(self.runs) == 1:
            return self.length * self.runs[0][1]
        ends = [start for start, _ in self.runs[1:]] + [self.length]
        return sum((end - start) * version for (start, version), end in zip(self.runs, ends, strict=True))


@dataclass(eq=False)
class Lane:
    clock: Clock
    device: Device
    costs: Decoder
    prompt: int
    chunk: int  # tokens after which a row's reader is attended to; 0: never
    static: bool  # rows that have ended keep their places, padded to the longest
    attend: Callable[[Lane, list[Row], list[Row]], None]  # called with the rows that end, and those with a full chunk
    running: bool = False
    rows: dict[Row, None] = field(default_factory=dict)
    homes: int = 0  # rows that have begun here, and not ended
    steps: int = 0
    places: int = 0  # of rows in all decode steps
    pauses: float = 0.0  # seconds
    peak_rows: int = 0
    peak_tokens: int = 0

    def __post_init__(self) -> None:
        self._job = Job("decode", self._arrive)
        self._context = 0  # tokens of all rows after these steps
        self._ends: list[int] = []  # the steps with which rows end
        self._ending: dict[int, list[Row]] = {}  # those rows
        self._full: list[tuple[int, int]] = []  # the step with which rows that joined at another have a full chunk
        self._joined: dict[int, dict[Row, None]] = {}  # those rows, by the step at which they joined
        self._joining: list[Row] = []
        self._changes: list[Callable[[], None]] = []
        self._plan = 0  # decode steps to the next event
        self._planned = 0.0  # seconds of work until then
        self._held = 0.0  # of which the first are a pause
        self._pause = 0.0  # seconds before the next plan
        self._width = self._longest = 0  # places of a static lane, and most tokens of a row less the steps made
        self._begun = self._worked = 0.0

    @property
    def busy(self) -> float:
        return self._worked + (self.clock.now - self._begun if self.running else 0.0)

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
                worked = self._planned - self.device.left(self._job)
                self._plan, self._planned = made, self._held + self._cost(made)
                self.device.reset(self._job, max(0.0, self._planned - worked))
            return
        self._width, self._longest = 0, 0
        self._take()
        if self.rows:
            self.running, self._begun = True, self.clock.now
            self.device.begin(self._job, self._next())

    def stop(self) -> list[Row]:
        if self.running:
            self._settle(self._made_steps())
            self._leave()
        rows = [*self.rows, *self._joining]
        for row in self.rows:
            row.made += self.steps - row.since
        self.rows.clear()
        self._joining.clear()
        self._ends.clear()
        self._ending.clear()
        self._full.clear()
        self._joined.clear()
        self._context = 0
        return rows

    def made(self, row: Row) -> int:
        return row.made + self.steps - row.since if row in self.rows else row.made

    def live(self) -> list[tuple[Row, int]]:
        """Return its rows, those that are about to join included, and the tokens that each has."""
        return [*((row, self.made(row)) for row in self.rows), *((row, row.made) for row in self._joining)]

    def _leave(self) -> None:
        self.device.finish(self._job)
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
            end = self.steps + row.length - row.made
            if end in self._ending:
                self._ending[end].append(row)
            else:
                self._ending[end] = [row]
                heappush(self._ends, end)
            self._context += row.made
            self._longest = max(self._longest, row.made - self.steps) if self._width else row.made - self.steps
            self._width += 1
        if self.chunk:
            heappush(self._full, (self.steps + self.chunk, self.steps))
            self._joined[self.steps] = dict.fromkeys(self._joining)
        self._joining.clear()
        self.peak_rows = max(self.peak_rows, len(self.rows))

    def _next(self) -> float:
        # Plan up to the next event; return the seconds of work.
        self._plan = self._ends[0] - self.steps
        if self._full:
            self._plan = min(self._plan, self._full[0][0] - self.steps)
        self._held, self._pause = self._pause, 0.0
        self._planned = self._held + self._cost(self._plan)
        return self._planned

    def _cost(self, steps: int) -> float:
        costs, rows, context = self.costs, len(self.rows), self._context
        if self.static:
            rows, context = self._width, self._width * (self._longest + self.steps)
        first = costs.step + costs.row * rows + costs.context * (context + rows * (self.prompt + 0.5))
        rise = costs.context * rows
        if first >= costs.floor:
            return steps * first + rise * steps * (steps - 1) / 2
        short = min(steps, int((costs.floor - first) / rise) + 1 if rise else steps)  # steps below the floor
        more = steps - short
        return short * costs.floor + more * (first + rise * short) + rise * more * (more - 1) / 2

    def _made_steps(self) -> int:
        # Whole steps of the plan that are over.
        worked = self._planned - self.device.left(self._job) - self._held
        if worked <= 0:
            return 0
        return bisect_left(range(1, self._plan), worked * (1 - 1e-12), key=self._cost)

    def _settle(self, steps: int) -> None:
        rows = len(self.rows)
        self.steps += steps
        self._context += steps * rows
        self.places += steps * (self._width if self.static else rows)
        self.peak_tokens = max(self.peak_tokens, self._context)

    def _arrive(self) -> None:
        self._settle(self._plan)
        now, grown = self.steps, list[Row]()
        ended = self._ending.pop(now, [])
        if ended:
            heappop(self._ends)
        for row in ended:
            row.made = row.length
            del self.rows[row]
            if self.chunk:
                del self._joined[row.since][row]
            self._context -= row.length
        while self._full and self._full[0][0] == now:
            joined = heappop(self._full)[1]
            if rows := self._joined[joined]:
                heappush(self._full, (now + self.chunk, joined))
                grown += rows
            else:
                del self._joined[joined]
        self._plan = 0
        if ended or grown:
            self.attend(self, ended, grown)
        if not self.running:  # the step was cut
            return
        changes, self._changes = self._changes, []
        for change in changes:
            change()
        self._take()
        if self.rows:
            self.device.reset(self._job, self._next())
        else:
            self._leave()


@dataclass(slots=True, eq=False)
class Backlog:
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


@dataclass(eq=False)
class Scorer:
    """A scorer in the steps of a run, one after the other: finished rows first, then what the others have grown by."""

    index: int  # among the scorers
    reader: Reader
    clock: Clock
    device: Device
    place: Place
    prompt: int
    whole: Callable[[Sequence[Row]], float] | None  # seconds for finished rows, of one that reads nothing ahead
    done: Callable[[], None]  # called when it has answered, or a step is over

    def __post_init__(self) -> None:
        self._backlogs: list[Backlog] = []
        self._busy = False
        self._pace = 0.0  # seconds for each token, of the fastest call

    def begins(self) -> Backlog:
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
                self.done()
            else:
                return

    def forget(self, row: Row) -> None:
        row.read[self.index] = 0

    def withdrawn(self) -> None:
        self._busy = False
        self.wake()

    def begin(self, call: Call) -> None:
        job = Job("score", lambda: self._over(call, job))
        self.device.begin(job, call.seconds)

    def _put(self, call: Call) -> None:
        self._busy = True
        self.place.put(call)

    def _urgent(self, backlog: Backlog) -> Call:
        finished, backlog.finished = backlog.finished, []
        prompt, unread = self.prompt, backlog.unread
        work = [(row, prompt + row.length) for row in finished]
        if unread:
            for row in finished:
                unread.pop(row, None)
        if self.whole is not None:
            seconds = self.whole(finished)
        else:
            seconds = self._seconds(work) + self.reader.answer * len(finished)
        return Call(self, backlog, work, finished, seconds, self.clock.now)

    def _ahead(self, backlog: Backlog) -> Call:
        budget = DEFAULT_TIME_SLICE.seconds / self._pace if self._pace else math.inf
        work: list[tuple[Row, int]] = []
        prompt, index = self.prompt, self.index
        for row, sent in backlog.unread.items():
            stop = prompt + sent
            budget -= stop - row.read[index]
            if work and budget < 0:
                break
            work.append((row, stop))
        return Call(self, backlog, work, (), self._seconds(work), self.clock.now)

    def _seconds(self, work: Sequence[tuple[Row, int]]) -> float:
        tokens = pairs = 0
        index = self.index
        for row, stop in work:
            start = row.read[index]
            tokens += stop - start
            pairs += stop * stop - start * start
        return self.reader.call + self.reader.passes.seconds(tokens, pairs / 2) if tokens else 0.0

    def _over(self, call: Call, job: Job) -> None:
        self.device.finish(job)
        backlog, now, tokens, index = call.backlog, self.clock.now, 0, self.index
        for row, stop in call.work:
            tokens += stop - row.read[index]
            row.read[index] = stop
        unread = backlog.unread
        for row, stop in () if call.finished else call.work:
            sent = unread.pop(row, -1)
            if self.prompt + sent > stop:
                unread[row] = sent  # behind all others
        if tokens and self.whole is None:
            pace = (now - call.at) / tokens
            self._pace = min(pace, DEFAULT_TIME_SLICE.rise * self._pace) if self._pace else pace
        backlog.calls.append((call.at, now))
        self._busy = False
        self.place.end()
        if call.finished:
            backlog.last, backlog.answered = now, backlog.answered + len(call.finished)
            self.done()
        self.wake()
        self.place.next()
