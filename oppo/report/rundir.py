"""The run directory: everything about a run in files that other tools can read, written beside the run.

=================  ====================================================================================
``config.toml``    the resolved settings
``metrics.jsonl``  one flat object a step, under TRL's PPO names and ours
``samples.jsonl``  a few rollouts of each step, with text and score
``journal.jsonl``  what became of every rollout
``log.jsonl``      how the run began, its steps, what was dropped, how it ended (:mod:`oppo.report.log`)
``trace.json``     Chrome trace: a track for each stage and model, an arrow for each rollout
``summary.json``   what the run came to
``report.html``    charts, summary and samples, self-contained
=================  ====================================================================================
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from oppo.errors import ConfigError
from oppo.events import Batch, StepReport
from oppo.observe import Observer, Span
from oppo.report import journal
from oppo.report.journal import Record
from oppo.report.metrics import Metrics, record, summary
from oppo.report.overlap import Role, occupation
from oppo.report.page import page
from oppo.report.samples import Decode, samples
from oppo.report.trace import CLOSING, OPENING, Trace
from oppo.report.writer import Writer

ROLES: Mapping[str, Role] = {"actor": "decode", "scorers": "score", "trainer": "update"}
"""What the threads of ``oppo train`` do, by the names of their tracks."""

_SHOWN_STEPS = 3  # steps at the start and at the end whose samples the page shows


class RunDirectory(Observer):
    """An observer that writes a run directory; a context manager that completes it.

    Args:
        path: the directory; made, and must be empty if it exists.
        config: text of ``config.toml``.
        decode: token ids to text; without it no samples are written.
        keep: rollouts of each step in ``samples.jsonl``.
        trace: write ``trace.json``.
        threaded: write in a thread; false writes at once, as virtual time needs it.
        roles: what each model track does, for the overlap metrics.
        source: the stage whose items are the rollouts' events.

    Raises:
        ConfigError: the directory is already used or cannot be written.
    """

    def __init__(
        self,
        path: Path,
        *,
        config: str = "",
        decode: Decode | None = None,
        keep: int = 4,
        trace: bool = True,
        threaded: bool = True,
        roles: Mapping[str, Role] = ROLES,
        source: str = "generate",
    ) -> None:
        self.path = path
        self._decode = decode
        self._keep = keep
        self._roles = roles
        self._source = source
        self._trace = Trace() if trace else None
        self._lock = threading.Lock()
        self._model_spans: list[Span] = []  # guarded by the lock: models report from their own threads
        self._records: list[Metrics] = []
        self._first_samples: list[Record] = []
        self._last_samples: list[list[Record]] = []
        self._at = 0.0
        self._files: dict[str, TextIO] = {}
        self._open = ExitStack()
        self._closed = False
        require_unused(path)
        names = ("metrics.jsonl", "samples.jsonl", "journal.jsonl", *(("trace.json",) if trace else ()))
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.toml").write_text(config, encoding="utf-8")
            for name in names:
                self._files[name] = self._open.enter_context((path / name).open("w", encoding="utf-8"))
        except OSError as error:
            self._open.close()
            raise ConfigError(f"the run directory {path} cannot be written: {error.strerror or error}") from error
        self._writer = Writer(threaded=threaded)
        if trace:
            self._write("trace.json", OPENING)

    def model_span(self, span: Span) -> None:
        """Take note of a model's work; the listener for model threads, safe to call from any of them."""
        with self._lock:
            self._model_spans.append(span)

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Journal an event of a rollout; keep a few rollouts of a batch."""
        self._at = at
        if stage == self._source:
            if (entry := journal.entry(step, item, at)) is not None:
                self._write_records("journal.jsonl", [entry])
            if self._trace is not None:
                self._trace.item(stage, item, at)
        elif isinstance(item, Batch) and self._decode is not None and self._keep:
            self._sample(step, item, self._decode)

    def on_span(self, span: Span) -> None:
        """Trace a stage's execution."""
        if self._trace is not None:
            self._trace.span(span, "stages")

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Write the step's metrics, and have everything about it on disk."""
        spans = self._take_spans()
        if isinstance(result, StepReport):
            metrics = record(result, channels, occupation(spans, self._roles))
            self._records.append(metrics)
            self._write_records("metrics.jsonl", [metrics])
            self._write_records("journal.jsonl", journal.endings(step, result, self._at))
        self._flush()

    def summary(self) -> dict[str, float | int | None]:
        """Return what the run comes to so far."""
        return summary(self._records)

    def close(self) -> None:
        """Complete the directory: the last spans, the summary, the page; idempotent.

        Raises:
            OSError: something could not be written.
        """
        if self._closed:
            return
        self._closed = True
        with self._open, closing(self._writer):  # whatever fails, every file is closed
            self._take_spans()
            self._flush()
            if self._trace is not None:
                self._write("trace.json", CLOSING)
            shown = [*self._first_samples, *(each for step in self._last_samples for each in step)]
            self._writer.submit(lambda: self._complete(page(self.path.name, self._records, shown), self.summary()))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _take_spans(self) -> list[Span]:
        with self._lock:
            spans, self._model_spans = self._model_spans, []
        if self._trace is not None:
            for span in spans:
                self._trace.span(span, "models")
        return spans

    def _sample(self, step: int, batch: Batch, decode: Decode) -> None:
        chosen = list(samples(step, batch, self._keep, decode))
        self._write_records("samples.jsonl", chosen)
        if not self._first_samples:
            self._first_samples = chosen
        else:
            self._last_samples = [*self._last_samples, chosen][-_SHOWN_STEPS:]

    def _write_records(self, name: str, records: Iterable[Mapping[str, object]]) -> None:
        self._write(name, "".join(json.dumps(each, ensure_ascii=False, allow_nan=False) + "\n" for each in records))

    def _write(self, name: str, text: str) -> None:
        if text:
            self._writer.submit(_writing(self._files[name], text))

    def _flush(self) -> None:
        if self._trace is not None:
            self._write("trace.json", self._trace.take())
        for file in self._files.values():
            self._writer.submit(file.flush)

    def _complete(self, html: str, facts: Mapping[str, object]) -> None:
        (self.path / "report.html").write_text(html, encoding="utf-8")
        (self.path / "summary.json").write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def require_unused(path: Path) -> None:
    """Check that ``path`` is empty or does not exist.

    Raises:
        ConfigError: it is used, is no directory, or cannot be looked into.
    """
    try:
        used = sorted(entry.name for entry in path.iterdir()) if path.exists() else []
    except OSError as error:
        raise ConfigError(f"the run directory {path} cannot be used: {error.strerror or error}") from error
    if used:
        raise ConfigError(
            f"the run directory {path} is already used (it holds {', '.join(used[:3])}"
            f"{', ...' if len(used) > 3 else ''}): choose another run.name, or remove it"
        )


def _writing(file: TextIO, text: str) -> Callable[[], None]:
    def write() -> None:
        file.write(text)

    return write
