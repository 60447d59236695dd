"""Work in time: Chrome traces (``chrome://tracing``, Perfetto), and the latest steps for a timeline.

Whole steps have a track too, and with lookahead as many as can be alive together.

The format is the array form of Google's "Trace Event Format", whose closing bracket is optional: a trace that a crash
cut short can still be opened.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal, TextIO, TypeAlias

import psutil

from oppo.events import Chunk, Defer, Finish, Prompt, ToolTokens
from oppo.observe import Observer, Span, now


@dataclass(frozen=True, slots=True)
class TimedStep:
    # All times in seconds on the clock of :mod:`oppo.observe`
    index: int  # of the step in its run, from 0
    start: float
    end: float
    cut: float | None  # when the last rollout finished or was deferred; `None` without one
    deferred: int  # rollouts that the cut deferred to the next step
    spans: Sequence[Span]  # of the models' work for the step, in the order of their ends
    beside: Sequence[Span] = ()  # of their work for others that overlaps the step in time; empty without lookahead


@dataclass(slots=True)
class _Cut:
    at: float | None = None
    deferred: int = 0


class Timekeeper(Observer):
    """An observer that keeps the latest steps; a listener to models in threads of their own."""

    def __init__(self, *, source: str = "generate", kept: int = 2) -> None:
        self.steps: deque[TimedStep] = deque(maxlen=kept)
        self._source = source
        self._lock = threading.Lock()
        self._new: list[Span] = []  # guarded by the lock
        self._work: list[Span] = []  # for steps that have not ended, and what may lie beside them
        self._whole: Span | None = None
        self._cuts: dict[int, _Cut] = {}

    def model_span(self, span: Span) -> None:
        with self._lock:
            self._new.append(span)

    def take(self) -> list[Span]:
        with self._lock:
            spans, self._new = self._new, []
        self._work += [span for span in spans if span.step is not None]
        return spans

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        if stage == self._source and isinstance(item, Finish | Defer):
            cut = self._cuts.setdefault(step, _Cut())
            cut.at = at
            cut.deferred += isinstance(item, Defer)

    def on_span(self, span: Span) -> None:
        if span.kind == "step":
            self._whole = span

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        del result, channels
        self.complete(step)

    def complete(self, step: int) -> Sequence[Span]:
        spans, whole, cut = self.take(), self._whole, self._cuts.get(step, _Cut())
        if whole is not None:
            own = tuple(span for span in self._work if span.step == step)
            beside = tuple(
                span for span in self._work if span.step != step and span.end > whole.start and span.start < whole.end
            )
            self.steps.append(TimedStep(step, whole.start, whole.end, cut.at, cut.deferred, own, beside))
            # No later step begins before this one did.
            self._work = [span for span in self._work if span.end > whole.start]
        self._whole = None
        self._cuts = {later: each for later, each in self._cuts.items() if later > step}
        return spans


class Cores:
    """How busy this machine is beside this program and its children: ``others`` is a share of the cores' time."""

    def __init__(self) -> None:
        self.others = 0.0
        self._since, self._last = now(), self._taken()

    def measure(self, *, least: float = 0.0) -> bool:
        """Measure since the last time; return whether it was ``least`` seconds ago, so that it was done."""
        if now() - self._since < least:
            return False
        found = self._taken()
        own, busy, whole = (new - old for new, old in zip(found, self._last, strict=True))
        self._since, self._last = now(), found
        self.others = min(1.0, max(0.0, (busy - own) / whole)) if whole > 0 else 0.0
        return True

    def _taken(self) -> tuple[float, float, float]:
        # Seconds of this program's, of all work and of all cores
        machine, this, own = psutil.cpu_times(), psutil.Process(), 0.0
        for process in (this, *this.children(recursive=True)):
            with suppress(psutil.Error):  # it has ended meanwhile
                own += sum(process.cpu_times()[:4])  # with its children that have ended
        whole = sum(machine) - getattr(machine, "guest", 0.0) - getattr(machine, "guest_nice", 0.0)
        return own, whole - machine.idle - getattr(machine, "iowait", 0.0), whole


Event: TypeAlias = dict[str, object]
TraceProcess: TypeAlias = Literal["stages", "models"]

_PIDS: dict[TraceProcess, int] = {"stages": 1, "models": 2}

TRACED = 20  # steps at the beginning of a run, and as many at its end, that its trace shows by default


class Trace:
    def __init__(self) -> None:
        self._tids: dict[tuple[TraceProcess, str], int] = {}
        self._deferred: set[int] = set()
        self._lanes: list[float] = []  # when the last step of each track of whole steps ended
        self._names: list[Event] = [
            {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for name, pid in _PIDS.items()
        ]
        self._events: list[Event] = []

    def span(self, span: Span, process: TraceProcess) -> None:
        duration = _microseconds(max(0.0, span.end - span.start))
        place = self._place(process, self._lane(span) if span.kind == "step" else span.track)
        slice_ = {"ph": "X", "name": span.label, "ts": _microseconds(span.start), "dur": duration, **place}
        self._events.append(slice_ | ({} if span.step is None else {"args": {"step": span.step + 1}}))

    def item(self, stage: str, item: object, at: float) -> None:
        """Add the arrow of a rollout: from its prompt, by way of every deferral, to its end."""
        if isinstance(item, Chunk | ToolTokens):
            if item.rollout in self._deferred:
                self._deferred.remove(item.rollout)
                self._arrow("t", stage, item.rollout, at)
        elif isinstance(item, Prompt):
            self._arrow("s", stage, item.rollout, at)
        elif isinstance(item, Defer):
            self._deferred.add(item.rollout)
            self._arrow("t", stage, item.rollout, at)
        elif isinstance(item, Finish):
            self._deferred.discard(item.rollout)
            self._arrow("f", stage, item.rollout, at)

    def _lane(self, whole: Span) -> str:
        # Slices of one track may not overlap, and with lookahead steps do.
        free = [lane for lane, end in enumerate(self._lanes) if end <= whole.start]
        if not free:
            free, self._lanes = [len(self._lanes)], [*self._lanes, 0.0]
        self._lanes[free[0]] = whole.end
        return f"{whole.track} ({free[0] + 1})" if free[0] else whole.track

    def take(self) -> tuple[str, str]:
        names, events = _text(self._names), _text(self._events)
        self._names, self._events = [], []
        return names, events

    def _arrow(self, phase: str, stage: str, rollout: int, at: float) -> None:
        arrow: Event = {"ph": phase, "name": "rollout", "cat": "rollout", "id": rollout, "ts": _microseconds(at)}
        self._events.append(arrow | self._place("stages", stage) | ({"bp": "e"} if phase == "f" else {}))

    def _place(self, process: TraceProcess, track: str) -> dict[str, int]:
        pid, key = _PIDS[process], (process, track)
        if key not in self._tids:
            self._tids[key] = len(self._tids) + 1
            name = {"ph": "M", "name": "thread_name", "pid": pid, "tid": self._tids[key], "args": {"name": track}}
            self._names.append(name)
        return {"pid": pid, "tid": self._tids[key]}


class TraceFile:
    """Holds the first and the last steps of a run, and while it is open up to twice as many of the last."""

    def __init__(self, file: TextIO, steps: int | None) -> None:
        self._file = file
        self._limit = steps
        self._first = 0
        self._later = 0
        self._begin_of_later = 0
        self._names = ""
        self._last: deque[str] = deque(maxlen=steps)
        file.write("[\n")

    def write(self, names: str, events: str) -> None:
        self._file.write(names + events)
        if self._limit is None:
            return
        if self._first < self._limit:
            self._first += 1
            self._begin_of_later = self._file.tell()
            return
        self._names += names
        self._last.append(events)
        self._later += 1
        if self._later == 2 * self._limit:
            self._shorten()

    def close(self, names: str, events: str) -> None:
        self._shorten()
        self._file.write(f'{names}{events}{{"ph":"M","name":"process_labels","pid":1,"args":{{"labels":"oppo"}}}}\n]\n')

    def _shorten(self) -> None:
        if self._later > len(self._last):
            self._file.seek(self._begin_of_later)
            self._file.truncate()
            self._file.write(self._names + "".join(self._last))
            self._later = len(self._last)


def _text(events: list[Event]) -> str:
    return "".join(json.dumps(event, separators=(",", ":")) + ",\n" for event in events)


def _microseconds(at: float) -> float:
    return round(at * 1e6, 3)
