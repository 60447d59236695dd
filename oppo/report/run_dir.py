"""The run directory: a run in files that other tools can read, as ``docs/runs.md`` lists them, written beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, TextIO, TypeAlias, cast

from oppo.atomic_files import make, opened, put, sync
from oppo.declared import require_whole
from oppo.errors import ConfigError, behind
from oppo.evaluation import Evaluated
from oppo.evaluation.evaluate import BEFORE
from oppo.events import Batch, Chunk, IntArray, Response, StepReport
from oppo.models import Detokenize
from oppo.observe import Observer, Span
from oppo.redact import holds_secret, redacted, redacted_values
from oppo.report.charts import Excerpt
from oppo.report.metrics import finite, metrics_of, step_metrics, summary
from oppo.report.page import write_report
from oppo.report.records import (
    EVALUATIONS,
    JOURNAL,
    METRICS,
    SAMPLES,
    SUMMARY,
    WORK,
    Lock,
    Mark,
    Record,
    Writer,
    clear,
    gaps,
    journal_drain,
    journal_endings,
    journal_entry,
    journal_rounds,
    line_of,
    read,
    require_stepless,
    require_unused,
    rewind,
    work_of,
)
from oppo.report.run_reader import note_times, recorded
from oppo.report.trace import TRACED, Cores, TimedStep, Timekeeper, Trace, TraceFile
from oppo.scorers import Extras
from oppo.stages.dynamic_sampling import Rounds


def samples(
    step: int, batch: Batch, count: int, decode: Detokenize, extras: Mapping[int, Mapping[str, object]] | None = None
) -> Iterator[Record]:
    order = sorted(range(len(batch)), key=lambda row: (float(batch.scores[row]), row))
    last, rows = len(order) - 1, batch.rows()
    spread = [k * last // (count - 1) for k in range(count)] if count > 1 else [last]
    for row in order if count >= len(order) else [order[place] for place in spread]:
        response, span = batch.responses[row], rows[row]
        extra = (extras or {}).get(response.prompt.rollout)
        kl = None if batch.reference is None else (batch.logprobs[span] - batch.reference[span])[response.sampled]
        yield {
            "step": step,
            "rollout": response.prompt.rollout,
            **({"first": response.prompt.first} if response.prompt.branch else {}),
            **({"role": response.prompt.role} if response.prompt.role else {}),
            "score": float(batch.scores[row]),
            "kl": None if kl is None else float(kl.sum()),
            "tokens": len(response),
            "reason": batch.reasons[row],
            **_said(response, decode),
            **({"extra": redacted_values(extra)} if extra else {}),
        }


def _said(response: Response, decode: Detokenize) -> Record:
    # With whose text is whose, where a tool or an environment has spoken too.
    def text(tokens: IntArray) -> str:
        return redacted(decode(tokens.tolist()))

    whole: Record = {"prompt": text(response.prompt.tokens), "completion": text(response.tokens)}
    if response.sampled.all():
        return whole
    pieces = response.pieces()
    parts = [{"by": "policy" if isinstance(each, Chunk) else "tool", "text": text(each.tokens)} for each in pieces]
    return {**whole, "parts": parts}


def evaluation_record(found: Evaluated, count: int, decode: Detokenize | None) -> Record:
    metrics = {name: finite(value) for name, value in found.metrics.items()}
    samples = (
        [
            {"score": float(each.score), "reason": each.finish.reason, **_said(each.finish.response, decode)}
            for each in found.answers[:count]
        ]
        if decode is not None
        else []
    )
    return {"step": found.step, "version": found.version, **metrics, "samples": samples}


# Files of one object a line, each with its `step` (:mod:`oppo.report.records`)
RECORDS = (METRICS, SAMPLES, WORK, JOURNAL)

Flushed: TypeAlias = Mapping[str, object]  # plain values of JSON

_EVERY = 5.0  # seconds, at least, between looks at the machine and between writes of the timeline


class RunDirectory(Observer):
    """An observer that writes a run directory; a context manager that completes it.

    The directory is locked meanwhile. Secrets are redacted in its files (:mod:`oppo.redact`).

    Args:
        path: the directory, which is made; an existing one may hold files of a run that made no step.
        config: text of ``config.toml``, without secrets.
        decode: token ids to text; ``None`` writes no samples.
        keep: rollouts of each step in ``samples.jsonl``.
        trace: steps at the beginning, and as many at the end, that ``trace.json`` shows; ``None``: all; 0: no trace.
        threaded: write in a thread; otherwise at once, as virtual time needs it.
        source: the stage whose items are the rollouts' events.
        resumed_at: steps made by the run in this directory, up to its checkpoint. The directory stays as it is until
            :meth:`begin`. ``None``: a new run, which begins at once.
        lock: of the directory, if it is already held; released when the directory is complete.
        flushed: what :meth:`flush` returned before the checkpoint; files that begin so are not parsed again.

    Attributes:
        trained: rollouts that the run has trained so far; at least one if records of steps are lost.
        made: steps that it has made.
        evaluated: whether the evaluation before the first step is recorded.
        faults: messages about records that were damaged when the resumed run began.

    Raises:
        ConfigError: a number is negative or not whole, ``config`` holds a secret, or the directory is used by another
            run or cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: str = "",
        decode: Detokenize | None = None,
        keep: int = 4,
        trace: int | None = TRACED,
        threaded: bool = True,
        source: str = "generate",
        resumed_at: int | None = None,
        lock: Lock | None = None,
        flushed: Flushed | None = None,
    ) -> None:
        _require(config, keep=keep, trace=trace or 0, resumed_at=resumed_at or 0)
        self.path = path
        self._config = config
        self._resumed_at = resumed_at
        self._flushed = flushed or {}
        self._decode = decode
        self._keep = keep
        self._source = source
        self._trace = None if trace == 0 else Trace()
        self._traced = trace
        self._trace_file: TraceFile | None = None
        self._timekeeper = Timekeeper(source=source)
        self._threaded = threaded
        self._cores = Cores()
        self.trained = 0
        self.made = resumed_at or 0
        self.evaluated = False
        self.faults: list[str] = []
        self._at = 0.0  # loop time of the latest item
        self._extras: dict[int, dict[int, Mapping[str, object]]] = {}  # by step and rollout
        self._files: dict[str, TextIO] = {}
        self._marks: dict[str, Mark] = {}  # of what is written; the writer's
        self._stack = ExitStack()
        self._begun = False
        self._closed = False
        self._concluded = False
        if resumed_at is None:
            require_unused(path)
        with self._writable():
            make(path)
            self._lock = lock or Lock(path)
            self._stack.callback(self._lock.release)
        if resumed_at is None:
            self.begin()

    def begin(self) -> Self:
        """Open the files of a resumed run, once its state is known to fit; idempotent.

        Records of steps after the checkpoint are removed, except for observations and drains; the trace goes on in
        ``trace-<steps>.json``.

        Raises:
            ConfigError: the directory is used by another run or cannot be written.
        """
        if self._begun:
            return self
        with self._writable():
            if self._resumed_at is None:
                require_stepless(self.path)  # again: another run may have ended since
                clear(self.path)
            else:
                self._rewind(self._resumed_at)
            put(self.path / "config.toml", [self._config])
            for name in RECORDS:
                self._open(name, "a")
            if self._trace is not None:
                name = "trace.json" if self._resumed_at is None else f"trace-{self._resumed_at:06d}.json"
                self._trace_file = TraceFile(self._open(name, "w"), self._traced)
        self._writer = Writer(threaded=self._threaded)
        self._begun = True
        return self

    @contextmanager
    def _writable(self) -> Iterator[None]:
        try:
            yield
        except (ConfigError, OSError) as error:
            self._closed = True
            self._stack.close()
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"the run directory {self.path} cannot be written: {error.strerror or error}") from error

    def model_span(self, span: Span) -> None:
        """Keep a model's span; safe to call from any thread."""
        self._timekeeper.model_span(span)

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Journal a rollout's event or an observation; write a few samples of a batch."""
        self._at = at
        self._timekeeper.on_item(step, stage, item, at)
        if stage == self._source:
            if (entry := journal_entry(step, item, at)) is not None:
                self._write(JOURNAL, [entry])
            if self._trace is not None:
                self._trace.item(stage, item, at)
        elif isinstance(item, Rounds):
            self._write(JOURNAL, journal_rounds(step, item, at))
        elif isinstance(item, Evaluated):
            self.evaluated = True
            self._write(EVALUATIONS, [evaluation_record(item, self._keep, self._decode)])
        elif isinstance(item, Batch) and self._decode is not None and self._keep:
            self._write(SAMPLES, samples(step, item, self._keep, self._decode, self._extras.get(step)))
        elif isinstance(item, Extras):
            noted = self._extras.setdefault(step, {})
            for rollout, values in item.values.items():
                noted[rollout] = {**noted.get(rollout, {}), **values}

    def on_span(self, span: Span) -> None:
        """Trace a stage's execution; its work is in the tracks of the models."""
        self._timekeeper.on_span(span)
        if self._trace is not None and span.kind != "work":
            self._trace.span(span, "stages")

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Write the step's metrics, and flush all files."""
        del channels
        self.made = step + 1
        self._extras.pop(step, None)
        spans = self._timekeeper.complete(step)
        self._trace_models(spans)
        self._write(WORK, [{"step": step, "models": work_of(spans)}])
        if isinstance(result, StepReport):
            self.trained += len(result.trained)
            self._write(METRICS, [step_metrics(result)])
            self._write(JOURNAL, journal_endings(step, result, self._at))
        if self._trace is not None and self._trace_file is not None:
            self._writer.submit(partial(self._trace_file.write, *self._trace.take()))
        self._flush_files()
        if self._threaded:  # in virtual time seconds say nothing of this machine
            self._writer.submit(partial(self._note_time, tuple(self._timekeeper.steps)))

    def drained(self, step: int) -> None:
        """Journal that no step begins before ``step`` has ended, which is the last in flight, though none was due."""
        self._write(JOURNAL, [journal_drain(step, self._at)])

    def conclude(self) -> None:
        """Mark the run as complete: it reached its end, and its models are saved."""
        self._concluded = True

    def flush(self) -> Flushed:
        """Block until the records of all steps so far are on the disk; return what a resumed run knows them by."""
        self._writer.flush()
        self._sync()
        marks = {name: [mark.size, mark.crc, mark.lines] for name, mark in self._marks.items()}
        return {"trained": self.trained, "marks": marks}

    def abandon(self) -> None:
        """Release the directory as it is, before the process ends at once."""
        self._lock.release()

    def close(self) -> None:
        """Complete a directory that has begun: the last spans, the summary, the page; idempotent.

        Raises:
            OSError: a file could not be written.
        """
        if self._closed:
            return
        self._closed = True
        if not self._begun:
            self._stack.close()
            return
        with self._stack, closing(self._writer):  # closes every file, whatever fails
            self._trace_models(self._timekeeper.take())
            if self._trace is not None and self._trace_file is not None:
                self._writer.submit(partial(self._trace_file.close, *self._trace.take()))
            self._flush_files()
            self._writer.submit(self._complete)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with behind(error, f"completing the run directory {self.path}"):
            self.close()

    def _rewind(self, steps: int) -> None:
        (self.path / SUMMARY).unlink(missing_ok=True)
        marks = cast("Mapping[str, Sequence[int]]", self._flushed.get("marks", {}))
        there = [name for name in (*RECORDS, EVALUATIONS) if (self.path / name).exists()]
        known = {name: Mark(*marks[name]) for name in there if name in marks}
        known = {name: mark for name, mark in known.items() if Mark.of(self.path / name, mark.size) == mark}
        for name in there:
            self.faults += rewind(self.path / name, steps, known.get(name, Mark()))
            self._marks[name] = Mark.of(self.path / name)
        lost, unexplained = ([] if name in known else gaps(self.path / name, steps) for name in (METRICS, JOURNAL))
        self.faults += [*lost, *unexplained]
        counted = METRICS in known and cast("int", self._flushed["trained"])
        self.trained = int(counted or summary(metrics_of(self.path))["trained"]["total"] or bool(lost))
        self.evaluated = any(record["step"] == BEFORE for record in read(self.path / EVALUATIONS))

    def _trace_models(self, spans: Iterable[Span]) -> None:
        if self._trace is not None:
            for span in spans:
                self._trace.span(span, "models")

    def _open(self, name: str, mode: Literal["a", "w"]) -> TextIO:
        self._files[name] = file = self._stack.enter_context(opened(self.path / name, mode))
        return file

    def _write(self, name: str, records: Iterable[Mapping[str, object]]) -> None:
        text = "".join(map(line_of, records))
        if text:
            self.begin()
            if name not in self._files:
                self._open(name, "a")
            self._writer.submit(partial(self._append, name, text))

    def _append(self, name: str, text: str) -> None:
        self._files[name].write(text)
        self._marks[name] = self._marks.get(name, Mark()).after(text.encode())

    def _flush_files(self) -> None:
        for file in self._files.values():
            self._writer.submit(file.flush)

    def _sync(self) -> None:
        for name in (*RECORDS, EVALUATIONS):
            if name in self._files:
                os.fsync(self._files[name].fileno())
        sync(self.path)

    def _note_time(self, steps: Sequence[TimedStep]) -> None:
        if self._cores.measure(least=_EVERY):
            self._write_timeline(steps)

    def _write_timeline(self, steps: Sequence[TimedStep]) -> None:
        if steps:
            note_times(self.path, [Excerpt("latest", steps, self._cores.others)])

    def _complete(self) -> None:
        self._sync()
        self._write_timeline(tuple(self._timekeeper.steps))
        records = metrics_of(self.path)
        figures = summary(records, list(read(self.path / EVALUATIONS)))
        facts = {"steps": len(records), "complete": self._concluded, **figures}
        put(self.path / SUMMARY, [json.dumps(facts, indent=2) + "\n"])
        write_report([recorded(self.path, over=True)])


def _require(config: str, **counts: int) -> None:
    for name, count in counts.items():
        require_whole(name, count, 0, error=ConfigError)
    if holds_secret(config):
        raise ConfigError("config holds a secret, and would be written as it is: leave it out of the settings")
