"""Files of one JSON object a line: written, read, rewound to a checkpoint; the journal; the lock of a run directory.

In a file step n is the one after which n steps are made: 1 is the first, and an evaluation before it has step 0.
Records in memory have the index of a step, from 0 on.

The journal: the events of every rollout and the controllers' observation of every step, one JSON object a line.

A rollout's lines are ``admitted``, any number of ``answered`` (a turn, by its environment) and ``deferred``,
``finished``, and ``trained`` or ``dropped``. A step's line is ``observed``, with a line ``round`` before it for each
round in which its groups were selected. Where a signal ended a run with steps in flight, ``drained`` names the last of
them: no later step began before it had ended, which affects the run's results. Lines are in order of time: an
observation comes before every decision made from it, so a journal that ends anywhere explains every decision in it.
Only in a resumed run do the observations of repeated steps come before these steps.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import queue
import re
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain, islice
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final, TypeAlias, cast

from oppo.admission import Observation, Scoring, Stretch
from oppo.admission.protocol import Json
from oppo.atomic_files import nearby, opened, put, read_text
from oppo.declared import MOST, WHOLE, require_declared
from oppo.errors import ConfigError
from oppo.events import Chunk, Defer, Finish, Prompt, StepReport
from oppo.observe import Span
from oppo.redact import redacted
from oppo.stages.dynamic_sampling import Rounds
from oppo.turns import Answered

LOCK = "running.lock"  # the file that is locked: it holds the process id of the run, which removes it in the end


class Lock:
    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._file = opened(self._path, "a+")
        try:
            while not self._acquire():
                self._file.close()
                self._file = opened(self._path, "a+")
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(taken(directory)) from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def _acquire(self) -> bool:
        # The file may no longer be at its path, from where its last owner may have removed it.
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def is_locked(directory: Path) -> bool:
    try:
        with opened(directory / LOCK, "r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def taken(directory: Path) -> str:
    try:
        with opened(directory / LOCK, "r") as file:
            owner = file.read(20).strip()
    except (OSError, ValueError):  # the run has ended meanwhile, or the file was written by something else
        owner = ""
    return (
        f"the run directory {directory} is being written by another run (process {owner or 'unknown'}): "
        f"choose another run.name, or wait for it to end"
    )


Record: TypeAlias = dict[str, object]
# Called with the number, from 1, of each line that is no record, and the line
Damaged: TypeAlias = Callable[[int, bytes], None]

EVALUATIONS = "eval.jsonl"  # one object an evaluation, the first of step 0; only where a run is evaluated

OBSERVED = "observed"  # the event of a record that holds the controllers' observation of a step

# The event of a record of the last step that was in flight when a signal ended the run: the next began after it
DRAINED = "drained"

_SHOWN = 5  # numbers in a message
_LONGEST = 2**26  # bytes of a line
_BLOCK = 4096  # bytes of a disk's least


def unnoticed(number: int, line: bytes) -> None:
    del number, line


@dataclass(frozen=True, slots=True)
class Mark:
    """The first bytes of a file and their CRC-32: while they are the same, they need not be parsed again."""

    size: int = 0
    crc: int = 0
    lines: int = 0

    def after(self, data: bytes) -> Mark:
        return Mark(self.size + len(data), zlib.crc32(data, self.crc), self.lines + data.count(b"\n"))

    @classmethod
    def of(cls, path: Path, most: int | None = None) -> Mark:
        mark = cls()
        with opened(path, "r") as file:
            while data := file.buffer.read(min(2**20, 2**20 if most is None else most - mark.size)):
                mark = mark.after(data)
        return mark


def read(path: Path, damaged: Damaged = unnoticed, *, after: Mark = Mark()) -> Iterator[Record]:
    try:
        file = opened(path, "r")
    except FileNotFoundError:
        return
    with file:  # a torn line may end within a character
        file.buffer.seek(after.size)
        lines = iter(partial(file.buffer.readline, _LONGEST), b"")
        for number, line in enumerate(lines, after.lines + 1):
            record = _record(line, path.name)
            if record is None:
                damaged(number, line)
            else:
                yield {**record, "step": cast("int", record["step"]) - 1}


def line_of(record: Mapping[str, object]) -> str:
    counted = {**record, "step": cast("int", record["step"]) + 1}
    return json.dumps(counted, ensure_ascii=False, allow_nan=False) + "\n"


def _record(line: bytes, name: str) -> Record | None:
    try:
        record: object = json.loads(line, parse_constant=_number, parse_float=_number, parse_int=_whole)
    except (ValueError, RecursionError):
        return None
    if (
        not isinstance(record, dict)
        or type(step := record.get("step")) is not int
        or not (name != EVALUATIONS) <= step < MOST
    ):
        return None
    fits = _FITS.get(name)
    return record if fits is None or fits(record) else None


def _number(text: str) -> float:
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number")
    return number


def _whole(text: str) -> int:
    if (number := int(text)) not in WHOLE:
        raise ValueError(f"{text} is out of range")
    return number


def _is_entry(record: Record) -> bool:
    numbers = [record[key] for key in ("rollout", "group", "prompt_tokens", "tokens") if key in record]
    seen = record.get("event") != OBSERVED or _observation(record.get("seen")) is not None
    return isinstance(record.get("event"), str) and all(type(each) is int for each in numbers) and seen


def is_sample(record: Record) -> bool:
    parts = record.get("parts") or []
    return (
        isinstance(record.get("score"), int | float | None)
        and isinstance(record.get("prompt"), str)
        and isinstance(record.get("completion"), str)
        and isinstance(parts, list)
        and all(isinstance(each, dict) and {"by", "text"} <= each.keys() for each in parts)
    )


def _is_evaluation(record: Record) -> bool:
    return all(isinstance(value, int | float | None) for key, value in record.items() if key.startswith("eval/"))


def rewind(path: Path, steps: int, mark: Mark = Mark()) -> list[str]:
    """Keep in a file the records of the first ``steps`` steps, and what steers later ones; the file may be large.

    A resumed run repeats steps with the same observations, so that its controllers decide as before, and drains after
    the same steps, however often the run is killed. Damaged lines go to ``<name>.damaged``. What is before ``mark``,
    which the file has, stays as it is.
    """
    numbers: list[int] = []
    aside = path.with_name(f"{path.name}.damaged")

    def keep_aside(number: int, line: bytes) -> None:
        numbers.append(number)
        with opened(aside, "a") as file:
            file.buffer.write(line.removesuffix(b"\n") + b"\n")

    kept = _kept(read(path, keep_aside, after=mark), steps)
    put(path, chain(_lines(path, mark.lines), map(line_of, kept)))
    return [f"{path}: left out as damaged: {listed('line', numbers)}; see {aside.name}"] if numbers else []


def _lines(path: Path, count: int) -> Iterator[str]:
    with opened(path, "r") as file:
        yield from (line.decode() for line in islice(file.buffer, count))


def _kept(records: Iterator[Record], steps: int) -> Iterator[Record]:
    later: list[Record] = []  # of the repeated steps, which are few
    for record in records:
        step = cast("int", record["step"])
        if record.get("event") == DRAINED:  # the records after it belong to another run
            later = [each for each in later if cast("int", each["step"]) <= step]
        if step < steps:
            yield record
        elif record.get("event") in {OBSERVED, DRAINED}:
            later.append(record)
    yield from later


def gaps(path: Path, steps: int) -> list[str]:
    found = {record["step"] for record in read(path)}
    missing = [step + 1 for step in range(steps) if step not in found]
    return [f"{path}: no record of {listed('step', missing)}, nor of what was trained then"] if missing else []


def listed(noun: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    rest = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{noun}s {', '.join(map(str, numbers[:_SHOWN]))}{rest}"


METRICS, SAMPLES, WORK, REPORT = "metrics.jsonl", "samples.jsonl", "work.jsonl", "report.html"

SUMMARY = "summary.json"  # written last, however the run ends

IMAGES = "images"  # the folder of images that rows hold themselves

# The files that a run may leave without having made a step
STEPLESS = frozenset({METRICS, SAMPLES, WORK, EVALUATIONS, SUMMARY, REPORT, "config.toml", "journal.jsonl"}) | {
    *("timeline.json", "trace.json", "log.jsonl", "hang-report.json", "vllm.log", IMAGES)
}


def ended(path: Path) -> int | None:
    """Return the steps of a complete run, whose trained models are saved; ``None`` for any other."""
    try:
        facts: dict[str, object] = json.loads(read_text(path / SUMMARY))
        steps = facts["steps"] if facts["complete"] is True else None
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return None
    return steps if type(steps) is int else None


def require_unused(path: Path) -> None:
    nearest = path
    try:
        nearest = next(each for each in (path, *path.parents) if each.exists())
        if nearest == path:
            if is_locked(path):
                raise ConfigError(taken(path))
            require_stepless(path)
        with TemporaryFile(dir=nearest) as file:  # a disk that is full or read-only may allow it and still refuse
            file.write(bytes(_BLOCK))
    except OSError as error:
        raise ConfigError(
            f"the run directory {path} cannot be used: {nearest}: {error.strerror or error}; choose another "
            "run.directory"
        ) from error


def require_stepless(path: Path) -> None:
    used = sorted(entry.name for entry in path.iterdir() if entry.name != LOCK)
    if STEPLESS.issuperset(used) and next(read(path / METRICS), None) is None:
        return
    resumable = any(path.glob("checkpoints/step-*"))
    advice = [f"go on with `oppo resume {nearby(path)}`"] if resumable else []
    raise ConfigError(
        f"the run directory {nearby(path)} is already used (it holds {', '.join(used[:3])}"
        f"{', ...' if len(used) > 3 else ''}): {', '.join([*advice, 'choose another run.name'])}, or remove it"
    )


def clear(path: Path) -> None:
    """Delete the files of a run that made no step, except its logs, which the next run continues."""
    for name in STEPLESS - {"log.jsonl", "vllm.log", IMAGES}:
        (path / name).unlink(missing_ok=True)


JOURNAL = "journal.jsonl"  # the journal of a run directory


def journal_entry(step: int, item: object, at: float) -> Record | None:
    if isinstance(item, Chunk):  # the most frequent by far
        return None
    if isinstance(item, Prompt):
        return _line(step, at, "admitted", item.rollout, group=item.group, prompt_tokens=len(item.tokens))
    if isinstance(item, Defer):
        return _line(step, at, "deferred", item.rollout, age=item.age)
    if isinstance(item, Finish):
        return _line(step, at, "finished", item.rollout, reason=item.reason, tokens=len(item.response))
    if isinstance(item, Answered):
        facts = {"turn": item.turn, "tokens": item.tokens, "seconds": round(item.seconds, 6)}
        error = {"error": redacted(item.error)} if item.error else {}
        return _line(step, at, "answered", item.rollout, **facts, **error)
    if isinstance(item, Observation):
        return {"step": step, "at": round(at, 6), "event": OBSERVED, "seen": item.as_json()}
    return None


def journal_rounds(step: int, selected: Rounds, at: float) -> Iterator[Record]:
    for number, each in enumerate(selected, 1):
        yield {"step": step, "at": round(at, 6), "event": "round", "round": number, **asdict(each)}


def journal_endings(step: int, report: StepReport, at: float) -> Iterator[Record]:
    for rollout in report.trained:
        yield _line(step, at, "trained", rollout, version=report.version)
    for drop in report.dropped:
        yield _line(step, at, "dropped", drop.rollout, reason=redacted(drop.reason))


def journal_drain(step: int, at: float) -> Record:
    return {"step": step, "at": round(at, 6), "event": DRAINED}


def story(path: Path, rollout: int) -> list[Record]:
    """Return the lines of one rollout in the journal at ``path``, in order, as they are there."""
    found = (record for record in read(path) if record.get("rollout") == rollout)
    return [{**record, "step": cast("int", record["step"]) + 1} for record in found]


@dataclass(frozen=True)
class Replay:
    # What a resumed run decides as before
    observations: Mapping[int, Observation] = field(default_factory=dict)  # by step
    drains: frozenset[int] = frozenset()  # the steps after which the run drained because a signal had ended it


def read_replay(path: Path, first: int = 0) -> Replay:
    observed: dict[int, Observation] = {}
    drained: set[int] = set()
    for record in _steering(path, first):
        if record.get("event") == OBSERVED and (each := _observation(record.get("seen"))) is not None:
            observed[each.step] = each
        elif record.get("event") == DRAINED:
            last = cast("int", record["step"])
            drained = {*(step for step in drained if step < last), last}
            observed = {step: each for step, each in observed.items() if step <= last}  # later ones are made anew
    return Replay({step: each for step, each in observed.items() if step >= first}, frozenset(drained))


def _steering(path: Path, first: int) -> Iterator[Record]:
    # The few lines that may steer a run from step ``first`` on, without parsing the others
    with suppress(FileNotFoundError), opened(path, "r") as file:
        for line in iter(partial(file.buffer.readline, _LONGEST), b""):
            made = _STEP.match(line)
            steers = b'"drained"' in line or (b'"observed"' in line and (made is None or int(made[1]) > first))
            if steers and (record := _record(line, path.name)) is not None:
                yield {**record, "step": cast("int", record["step"]) - 1}


_STEP: Final = re.compile(rb'{"step": (\d{1,18}),')


def observations(path: Path, first: int = 0) -> Mapping[int, Observation]:
    """Return the observations of the steps from ``first`` on, by step, from the journal at ``path``."""
    return read_replay(path, first).observations


def _observation(seen: object) -> Observation | None:
    # ``None`` for a damaged one.
    try:
        found = Observation.from_json(cast("dict[str, Json]", seen))
        require_declared(found)
        for part in chain[Scoring | Stretch](found.scoring, found.stretches):
            require_declared(part)
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    return found


# By file: whether a line that was read is one of its records
_FITS: Final[Mapping[str, Callable[[Record], bool]]] = {
    SAMPLES: is_sample,
    JOURNAL: _is_entry,
    EVALUATIONS: _is_evaluation,
}


def _line(step: int, at: float, event: str, rollout: int, **facts: object) -> Record:
    return {"step": step, "at": round(at, 6), "event": event, "rollout": rollout, **facts}


# By model and label of the work: the number of calls, and their seconds
Work: TypeAlias = dict[str, dict[str, list[float]]]


def work_of(spans: Iterable[Span]) -> Work:
    # An evaluation is no part of a step
    found: Work = {}
    for span in (span for span in spans if span.role != "evaluate"):
        calls = found.setdefault(span.track, {}).setdefault(span.label, [0, 0.0])
        calls[0] += 1
        calls[1] = round(calls[1] + span.end - span.start, 6)
    return found


Job: TypeAlias = Callable[[], object]


class Writer:
    """Does jobs in order, in a thread of its own or at once; after one that fails, none, so that no gap is written."""

    def __init__(self, *, threaded: bool = True, capacity: int = 4096) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(capacity)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="oppo-writer", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, job: Job) -> None:
        self._raise()
        if self._thread is None:
            self._do(job)
            self._raise()
        else:
            self._jobs.put(job)

    def flush(self) -> None:
        self._jobs.join()
        self._raise()

    def close(self) -> None:
        """Block until every job is done, and end the thread; idempotent."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
            self._jobs.task_done()
        self._jobs.task_done()

    def _do(self, job: Job) -> None:
        if self._error is None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - the submitter raises it
                self._error = error
