"""The run directory: everything about a run in files that other tools can read, written beside the run.

====================  ===================================================================================
``config.toml``       the resolved settings
``metrics.jsonl``     one flat object a step, under TRL's PPO names and ours
``samples.jsonl``     a few rollouts of each step, with text and score
``journal.jsonl``     what became of every rollout, and what controllers were told of every step
``log.jsonl``         how the run began, its steps, what was dropped, how it ended (:mod:`oppo.report.log`)
``trace.json``        Chrome trace of the first and the last steps: a track for each stage and model, an arrow for
                      each rollout
``summary.json``      what the run came to, and whether that was its end, with everything saved: ``complete``
``report.html``       when each model worked in the latest two steps, charts, summary and samples, self-contained
``hang-report.json``  only where a run was ended because nothing moved (:mod:`oppo.liveness`)
``nonfinite/``        only where a run was ended because it diverged: its last batch (:mod:`oppo.report.dump`)
``*.damaged``         lines of a record that were no record any more when the run was resumed
====================  ===================================================================================
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from itertools import chain, groupby, islice
from operator import itemgetter
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO, cast

from oppo.durable import make, sync
from oppo.errors import ConfigError, behind
from oppo.events import Batch, StepReport
from oppo.numeric import require_whole
from oppo.observe import Observer, Span
from oppo.redact import holds_secret
from oppo.report import journal
from oppo.report.journal import JOURNAL
from oppo.report.lock import Lock
from oppo.report.metrics import Metrics, finite, record, summary
from oppo.report.occupancy import METRICS, REPORT, SAMPLES, SUMMARY, clear, require_stepless, require_unused
from oppo.report.overlap import Role, occupation
from oppo.report.page import page
from oppo.report.put import put
from oppo.report.records import gaps, read, rewind
from oppo.report.samples import Detokenize, samples
from oppo.report.timed import Timekeeper
from oppo.report.timeline import Schedule, timeline
from oppo.report.trace import TRACED, Trace, TraceFile
from oppo.report.writer import Writer

ROLES: Mapping[str, Role] = {
    "policy": "decode",
    "reference": "score",
    "reward model": "score",
    "critic": "score",
    "trainer": "update",
}
"""What the models of ``oppo train`` do, by the names of their tracks."""

RECORDS = (METRICS, SAMPLES, JOURNAL)
"""Files of one object a line, each with its ``step`` (:mod:`oppo.report.records`)."""

_SHOWN_STEPS = 3  # steps at the start and at the end whose samples the page shows


class RunDirectory(Observer):
    """An observer that writes a run directory; a context manager that completes it.

    The directory is locked meanwhile. Texts in its files are without secrets (:mod:`oppo.redact`); ``config`` must be.

    Args:
        path: the directory; made, and must be empty if it exists, but for what a run has left that made no step.
        config: text of ``config.toml``.
        decode: token ids to text; without it no samples are written.
        keep: rollouts of each step in ``samples.jsonl``.
        trace: steps at the beginning, and as many at the end, that ``trace.json`` shows; ``None``: all; 0: no trace.
        threaded: write in a thread; false writes at once, as virtual time needs it.
        roles: what each model track does, for the overlap metrics.
        source: the stage whose items are the rollouts' events.
        gauges: read at the end of each step and written among its metrics.
        resumed_at: steps that a run in this directory has behind it: what it wrote of later ones is taken back, but
            for observations, and the records go on from there; the trace goes on in ``trace-<steps>.json``.
            ``None``: a new run.
        lock: of the directory, where it is held already; released when the directory is complete.

    Attributes:
        trained: rollouts that the run has trained so far.
        faults: sentences about records that were damaged when the run was resumed.

    Raises:
        ConfigError: a number is none, ``config`` holds a secret, or the directory is already used, by a run that is
            over or one that goes on, or cannot be written.
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
        roles: Mapping[str, Role] = ROLES,
        source: str = "generate",
        gauges: Mapping[str, Callable[[], float]] | None = None,
        resumed_at: int | None = None,
        lock: Lock | None = None,
    ) -> None:
        _require(config, keep=keep, trace=trace or 0, resumed_at=resumed_at or 0)
        self.path = path
        self._decode = decode
        self._keep = keep
        self._roles = roles
        self._source = source
        self._gauges = dict(gauges or {})
        self._trace = None if trace == 0 else Trace()
        self._trace_file: TraceFile | None = None
        self._timekeeper = Timekeeper(source=source)
        self.trained = 0
        self.faults: list[str] = []
        self._at = 0.0
        self._files: dict[str, TextIO] = {}
        self._open = ExitStack()
        self._closed = False
        self._concluded = False
        if resumed_at is None:
            require_unused(path)
        try:
            make(path)
            self._held = lock or Lock(path)
            self._open.callback(self._held.release)
            if resumed_at is None:
                require_stepless(path)  # again: another run may have come and gone before the lock was had
                clear(path)
            else:
                self._rewind(resumed_at)
            put(path / "config.toml", config)
            for name in RECORDS:
                self._files[name] = self._open.enter_context((path / name).open("a", encoding="utf-8"))
            if self._trace is not None:
                name = "trace.json" if resumed_at is None else f"trace-{resumed_at:06d}.json"
                self._files[name] = self._open.enter_context((path / name).open("w", encoding="utf-8"))
                self._trace_file = TraceFile(self._files[name], trace)
        except OSError as error:
            self._open.close()
            raise ConfigError(f"the run directory {path} cannot be written: {error.strerror or error}") from error
        except ConfigError:
            self._open.close()
            raise
        self._writer = Writer(threaded=threaded)

    def model_span(self, span: Span) -> None:
        """Take note of a model's work; the listener for model threads, safe to call from any of them."""
        self._timekeeper.model_span(span)

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Journal an event of a rollout, or what was observed; keep a few rollouts of a batch."""
        self._at = at
        self._timekeeper.on_item(step, stage, item, at)
        if stage == self._source:
            if (entry := journal.entry(step, item, at)) is not None:
                self._write_records(JOURNAL, [entry])
            if self._trace is not None:
                self._trace.item(stage, item, at)
        elif isinstance(item, Batch) and self._decode is not None and self._keep:
            self._sample(step, item, self._decode)

    def on_span(self, span: Span) -> None:
        """Trace a stage's execution."""
        self._timekeeper.on_span(span)
        if self._trace is not None:
            self._trace.span(span, "stages")

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Write the step's metrics, and have everything about it on disk."""
        spans = self._timekeeper.complete(step)
        self._trace_models(spans)
        if isinstance(result, StepReport):
            metrics = record(result, channels, occupation(spans, self._roles))
            metrics |= {name: finite(gauge()) for name, gauge in self._gauges.items()}
            self.trained += len(result.trained)
            self._write_records(METRICS, [metrics])
            self._write_records(JOURNAL, journal.endings(step, result, self._at))
        if self._trace is not None and self._trace_file is not None:
            self._writer.submit(partial(self._trace_file.write, *self._trace.take()))
        self._flush()

    def conclude(self) -> None:
        """Note that the run has come to its end, and that everything it learned is saved."""
        self._concluded = True

    def flush(self) -> None:
        """Return when the records of the steps that are over are on the disk; blocks.

        Raises:
            OSError: something could not be written.
        """
        self._writer.flush()
        self._sync()

    def abandon(self) -> None:
        """Let others have the directory as it is: the process ends at once."""
        self._held.release()

    def close(self) -> None:
        """Complete the directory: the last spans, the summary, the page; idempotent.

        Raises:
            OSError: something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        with self._open, closing(self._writer):  # whatever fails, every file is closed
            self._trace_models(self._timekeeper.take())
            if self._trace is not None and self._trace_file is not None:
                self._writer.submit(partial(self._trace_file.close, *self._trace.take()))
            self._flush()
            self._writer.submit(self._complete)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with behind(error, f"completing the run directory {self.path}"):
            self.close()

    def _rewind(self, steps: int) -> None:
        """Take the records back to the first ``steps`` steps, and know of them what their writer knew."""
        (self.path / SUMMARY).unlink(missing_ok=True)
        for name in RECORDS:
            self.faults += rewind(self.path / name, steps)
        for name in (METRICS, JOURNAL):
            self.faults += gaps(self.path / name, steps)
        self.trained = int(summary(metrics_of(self.path))["trained"] or 0)

    def _trace_models(self, spans: Iterable[Span]) -> None:
        if self._trace is not None:
            for span in spans:
                self._trace.span(span, "models")

    def _sample(self, step: int, batch: Batch, decode: Detokenize) -> None:
        self._write_records(SAMPLES, samples(step, batch, self._keep, decode))

    def _write_records(self, name: str, records: Iterable[Mapping[str, object]]) -> None:
        self._write(name, "".join(json.dumps(each, ensure_ascii=False, allow_nan=False) + "\n" for each in records))

    def _write(self, name: str, text: str) -> None:
        if text:
            self._writer.submit(lambda: self._append(self._files[name], text))

    def _append(self, file: TextIO, text: str) -> None:
        file.write(text)

    def _flush(self) -> None:
        for file in self._files.values():
            self._writer.submit(file.flush)

    def _sync(self) -> None:
        for name in RECORDS:
            os.fsync(self._files[name].fileno())
        sync(self.path)

    def _complete(self) -> None:
        self._sync()
        write_page(self.path, [Schedule("the latest steps", tuple(self._timekeeper.steps))], self._roles)
        facts = {**summary(metrics_of(self.path)), "complete": self._concluded}
        put(self.path / SUMMARY, json.dumps(facts, indent=2) + "\n")


def write_page(path: Path, schedules: Sequence[Schedule], roles: Mapping[str, Role] = ROLES) -> None:
    """Write ``report.html`` of a run from the records in its directory.

    Args:
        path: the run directory.
        schedules: whose steps the page opens with, on one scale; those without a step are left out.
        roles: what each model track does.

    Raises:
        OSError: a file cannot be read or written.
    """
    of_step = (list(group) for _, group in groupby(read(path / SAMPLES), key=itemgetter("step")))
    shown = [*islice(of_step, 1), *deque(of_step, _SHOWN_STEPS)]
    opening = timeline(schedules, roles)
    put(path / REPORT, page(path.name, metrics_of(path), list(chain.from_iterable(shown)), opening))


def metrics_of(path: Path) -> Sequence[Metrics]:
    """Return the metrics of all steps, as they were written."""
    return [cast("Metrics", each) for each in read(path / METRICS)]


def _require(config: str, **counts: int) -> None:
    for name, count in counts.items():
        require_whole(name, count, 0, error=ConfigError)
    if holds_secret(config):
        raise ConfigError("config holds a secret, and would be written as it is: leave it out of the settings")
