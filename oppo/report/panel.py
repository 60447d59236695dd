"""A run on the terminal: a live panel, or a plain line for each step; standard streams that may go away."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from typing import Self, TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from oppo.admission import Bottleneck, Observation, together
from oppo.errors import counted
from oppo.evaluation import Evaluated
from oppo.evaluation.evaluate import BEFORE
from oppo.events import Batch, Chunk, Prompt, StepReport
from oppo.graph import Snapshot
from oppo.liveness import Stall
from oppo.observe import Observer, Span, now
from oppo.redact import excerpt, harmless, on_one_line
from oppo.report.metrics import MEMORY, MFU


class Display:
    """A text stream that discards its output after the first failed write, for the whole process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._enduring():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        with self._enduring():
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    @contextmanager
    def _enduring(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # gone, full or closed
            with suppress(OSError, ValueError):  # a stream without a descriptor needs no redirection
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


class _Harmless(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


@contextmanager
def displays() -> Iterator[None]:
    """Let standard output and standard error go away without an error while the context is open."""
    out, err = (cast("TextIO", Display(stream)) for stream in (sys.stdout, sys.stderr))
    last = logging.lastResort or logging.NullHandler()
    before = last.formatter
    with redirect_stdout(out), redirect_stderr(err):
        last.setFormatter(_Harmless())
        try:
            yield
        finally:
            last.setFormatter(before)
            out.flush()
            err.flush()


_SAMPLE = 300  # characters of the response shown
_WINDOW = 8  # steps in the bottleneck shown
_NOTICES = 3  # shown, the latest
_NOTICE = 240  # characters of each


@dataclass(slots=True)
class _Stage:
    # The latest step for which it has sent something: with lookahead, each may be in another one.
    step: int
    sent: int = 0  # items
    seconds: float | None = None  # of a finished execution

    def doing(self, snapshots: Mapping[int, Snapshot], name: str) -> str:
        if self.seconds is not None:
            return f"done in {self.seconds:.2f} s"
        snapshot = snapshots.get(self.step)
        waits = snapshot is not None and name in snapshot.running and name not in snapshot.working
        return snapshot.doing(name) if snapshot is not None and waits else "working"


@dataclass(slots=True)
class _Decoding:
    step: int
    began: float
    tokens: int = 0


class Panel(Observer):
    """An observer that shows a run in progress; a context manager that leaves the terminal as it was.

    It counts steps from 1, as ``step 1/20``; a stall and errors have their index, from 0.

    Args:
        console: shows it.
        steps: of the whole run.
        live: redraw in place; otherwise one line a step.
        decode: token ids to text, for the best response of each step; ``None`` shows none.
        clock: seconds, for the rate of tokens within a step.

    Attributes:
        is_live: as given.
    """

    def __init__(
        self,
        console: Console,
        steps: int,
        *,
        live: bool,
        decode: Callable[[Sequence[int]], str] | None = None,
        clock: Callable[[], float] = now,
    ) -> None:
        self.is_live = live
        self._console = console
        self._steps = steps
        self._decode = decode
        self._clock = clock
        self._report: StepReport | None = None
        self._bottlenecks: deque[Bottleneck] = deque(maxlen=_WINDOW)
        self._done = 0
        self._decoding: _Decoding | None = None
        self._sample = Text("")
        self._snapshots: Callable[[], Sequence[Snapshot]] = tuple
        self._stall: str | None = None
        self._notices: deque[str] = deque(maxlen=_NOTICES)
        self._stages: dict[str, _Stage] = {}
        self._evaluated: list[Evaluated] = []
        self._answered = (0, 0)
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4) if live else None

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Count tokens and items; keep the best response of a batch."""
        del at
        self._stall = None
        if isinstance(item, Evaluated):
            self._note(item)
        known = self._stages.get(stage)
        if isinstance(item, Observation | Evaluated) or (known is not None and step < known.step):
            return  # no stage sends it, or it comes after the step
        if known is None or step > known.step:
            known = self._stages[stage] = _Stage(step)
        known.sent += 1
        if isinstance(item, Prompt | Chunk):
            if self._decoding is None or self._decoding.step != step:
                self._decoding = _Decoding(step, self._clock())
            self._decoding.tokens += len(item.tokens) if isinstance(item, Chunk) else 0
        elif isinstance(item, Batch) and len(item) and self._decode is not None:
            best = max(range(len(item)), key=lambda row: float(item.scores[row]))
            text = self._decode(item.responses[best].tokens.tolist())
            self._sample = Text(f"{float(item.scores[best]):+.3f}  {on_one_line(excerpt(text, _SAMPLE))}")

    def on_span(self, span: Span) -> None:
        stage = self._stages.get(span.track)
        if span.kind == "execution" and stage is not None and stage.step == span.step:
            stage.seconds = span.end - span.start

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        del channels
        self._done = step + 1
        if isinstance(result, StepReport):
            self._report = result
            if (found := Bottleneck.of_metrics(result.metrics, result.seconds)) is not None:
                self._bottlenecks.append(found)
            if self._live is None:
                self._console.out(line(result, self._done, self._steps), highlight=False)

    def on_evaluation(self, done: int, total: int) -> None:
        """Show how many of the responses to held-out prompts have ended."""
        self._answered = (done, total)

    def _note(self, found: Evaluated) -> None:
        self._evaluated.append(found)
        self._answered = (0, 0)
        if self._live is None and found.step == BEFORE:  # the others are in the lines of their steps
            self._console.out(f"before the first step  {held_out(found.metrics)}", highlight=False)

    def watch(self, snapshots: Callable[[], Sequence[Snapshot]]) -> None:
        """Show from now on which stage waits for which, by ``snapshots`` of the steps that are alive."""
        self._snapshots = snapshots

    def on_stall(self, stall: Stall) -> None:
        """Show the stall until an item moves; safe to call from any thread."""
        self._stall = stall.message()
        if self._live is None:
            self._console.out(self._stall, highlight=False)

    def on_notice(self, message: str) -> None:
        """Show a message about the run, without secrets, among the latest few; safe to call from any thread."""
        self._notices.append(on_one_line(excerpt(message, _NOTICE)))

    def render(self) -> Box:
        head = "waiting for the first step" if self._report is None else line(self._report, self._done, self._steps)
        stages, snapshots = Table.grid(padding=(0, 2)), {each.step: each for each in self._snapshots()}
        for name, stage in dict(self._stages).items():
            doing = f"{stage.doing(snapshots, name)}, {stage.sent} sent"
            stages.add_row(Text(name, style="bold"), Text(self._place(stage.step)), Text(doing))
        recent = together(self._bottlenecks)
        parts: list[RenderableType] = [Text(head)]
        parts += [Text(f"{recent.meaning}\n{recent.advice}")] if recent is not None else []
        parts += [ProgressBar(total=self._steps, completed=self._done), self._pace(), *self._devices()]
        parts += [*self._held_out(), stages]
        parts += [Text(self._stall, style="yellow")] if self._stall is not None else []
        parts += [Text(notice, style="dim") for notice in list(self._notices)]
        return Box(Group(*parts, self._sample), title="oppo", title_align="left")

    def _pace(self) -> Text:
        decoding = self._decoding
        if decoding is None:
            return Text("nothing decoded yet")
        rate = decoding.tokens / max(self._clock() - decoding.began, 1e-9)
        return Text(f"{self._place(decoding.step)}: {counted(decoding.tokens, 'token')}, {rate:,.0f} tokens/s")

    def _devices(self) -> Iterator[Text]:
        found = {} if self._report is None else self._report.metrics
        shown = [f"{kind} MFU {found[name]:.1%}" for kind, name in MFU.items() if found.get(name, 2.0) <= 1]
        shown += [f"{found[name]:.1f} GiB {kind}" for kind, name in MEMORY.items() if name in found]
        if shown:
            yield Text("  ".join(shown))

    def _place(self, step: int) -> str:
        return f"step {step + 1}/{self._steps}"

    def _held_out(self) -> Iterator[RenderableType]:
        if self._evaluated:
            first, last = self._evaluated[0], self._evaluated[-1]
            began = "" if first is last else f", {_short(first.score or math.nan)} at first"
            yield Text(f"{held_out(last.metrics)}{began}")
        done, total = self._answered
        if total:
            yield Text(f"held-out prompts: {done:,} of {counted(total, 'response')}")
            yield ProgressBar(total=total, completed=done)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live is not None:
            self._live.stop()


def line(report: StepReport, done: int, steps: int) -> str:
    metrics = report.metrics
    teacher = metrics.get("objective/teacher_kl")
    parts = [f"step {done}/{steps}"]
    if teacher is not None:
        parts.append(f"teacher kl {_short(teacher)}")
    if teacher is None or report.score:  # distillation alone has no score
        parts.append(f"score {_short(report.score)}")
    if "objective/kl" in metrics:
        parts.append(f"kl {_short(metrics['objective/kl'])}")
    if "response_length/mean" in metrics:
        parts.append(f"length {metrics['response_length/mean']:.0f}")
    tokens = metrics.get("response_length/tokens")
    if tokens is not None and report.seconds > 0:
        parts.append(f"{tokens / report.seconds:,.0f} tokens/s")
    if "eval/score" in metrics:
        parts.append(held_out(metrics))
    parts.append(f"deferred {counted(len(report.deferred), 'response')}")
    if report.dropped:
        parts.append(f"dropped {counted(len(report.dropped), 'response')}")
    if (found := Bottleneck.of_metrics(metrics, report.seconds)) is not None:
        parts.append(f"{found.largest}-bound")
    return "  ".join([*parts, f"{report.seconds:.2f} s"])


def held_out(metrics: Mapping[str, float]) -> str:
    interval = f" +- {metrics['eval/score_ci95']:.3f}" if "eval/score_ci95" in metrics else ""
    return f"held-out {_short(metrics.get('eval/score', math.nan))}{interval}"


def _short(value: float) -> str:
    return f"{value:z.3f}" if math.isfinite(value) else "-"  # no minus before a zero
