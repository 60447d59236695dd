"""A run on the terminal: a live panel, or a plain line for each step."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel as Box
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from oppo.admission import Bottleneck, Observation, together
from oppo.evaluation import Evaluated
from oppo.evaluation.evaluate import BEFORE
from oppo.events import Batch, Chunk, StepReport
from oppo.graph import Snapshot
from oppo.liveness import Stall
from oppo.observe import Observer, Span, now
from oppo.redact import redacted

_SAMPLE = 300  # characters of the response shown
_WINDOW = 8  # steps in the bottleneck shown


class Panel(Observer):
    """An observer that shows a run in progress; a context manager that leaves the terminal as it was.

    Args:
        console: shows it.
        steps: of the whole run.
        live: redraw in place; otherwise one line a step.
        decode: token ids to text, for the best response of each step; ``None`` shows none.
        clock: seconds, for the rate of tokens within a step.
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
        self._console = console
        self._steps = steps
        self._decode = decode
        self._clock = clock
        self._report: StepReport | None = None
        self._bottlenecks: deque[Bottleneck] = deque(maxlen=_WINDOW)
        self._done = 0
        self._tokens = 0
        self._began = clock()
        self._sample = Text("")
        self._snapshot: Callable[[], Snapshot | None] = lambda: None
        self._stall: str | None = None
        self._stages: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._evaluated: list[Evaluated] = []
        self._answered = (0, 0)
        self._live = Live(console=console, get_renderable=self.render, refresh_per_second=4) if live else None

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Count tokens and items; keep the best response of a batch."""
        del step, at
        self._stall = None
        if isinstance(item, Evaluated):
            self._note(item)
        if isinstance(item, Observation | Evaluated):  # which no stage sends
            return
        count = self._counts.get(stage, 0) + 1
        self._counts[stage] = count
        self._stages[stage] = f"working, {count} sent"
        if isinstance(item, Chunk):
            self._tokens += len(item.tokens)
        elif isinstance(item, Batch) and len(item) and self._decode is not None:
            best = max(range(len(item)), key=lambda row: float(item.scores[row]))
            text = self._decode(item.responses[best].tokens.tolist())
            self._sample = Text(f"{float(item.scores[best]):+.3f}  {printable(redacted(text), _SAMPLE)}")

    def on_span(self, span: Span) -> None:
        """Show that a stage is done with the step."""
        if span.track in self._stages:
            self._stages[span.track] = f"done in {span.end - span.start:.2f} s, {self._counts.get(span.track, 0)} sent"

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Show the step's report."""
        del channels
        self._done = step + 1
        if isinstance(result, StepReport):
            self._report = result
            if (found := Bottleneck.of_metrics(result.metrics, result.seconds)) is not None:
                self._bottlenecks.append(found)
            if self._live is None:
                self._console.out(line(result, self._done, self._steps), highlight=False)
        self._counts = {}
        self._tokens = 0
        self._began = self._clock()

    def on_evaluation(self, done: int, total: int) -> None:
        """Show how many of the responses to held-out prompts have ended."""
        self._answered = (done, total)

    def _note(self, found: Evaluated) -> None:
        self._evaluated.append(found)
        self._answered = (0, 0)
        if self._live is None and found.step == BEFORE:  # the others are in the lines of their steps
            self._console.out(f"before the first step  {held_out(found.metrics)}", highlight=False)

    def watch(self, snapshot: Callable[[], Snapshot | None]) -> None:
        """Show from now on which stage waits for which, by ``snapshot``."""
        self._snapshot = snapshot

    def on_stall(self, stall: Stall) -> None:
        """Show the stall until an item moves; safe to call from any thread."""
        self._stall = stall.sentence()
        if self._live is None:
            self._console.out(self._stall, highlight=False)

    def render(self) -> Box:
        """Return the panel of this moment."""
        head = "waiting for the first step" if self._report is None else line(self._report, self._done, self._steps)
        rate = self._tokens / max(self._clock() - self._began, 1e-9)
        stages = Table.grid(padding=(0, 2))
        snapshot = self._snapshot()
        for name, doing in dict(self._stages).items():
            waits = snapshot is not None and name in snapshot.running and name not in snapshot.working
            state = f"{snapshot.doing(name)}, {self._counts.get(name, 0)} sent" if snapshot and waits else doing
            stages.add_row(Text(name, style="bold"), Text(state))
        progress = ProgressBar(total=self._steps, completed=self._done)
        now_line = Text(f"this step: {self._tokens} tokens, {rate:.0f} tokens/s")
        stall = [Text(self._stall, style="yellow")] if self._stall is not None else []
        recent = together(self._bottlenecks)
        bottleneck = [Text(f"{recent.largest}-bound: {recent.sentence}")] if recent is not None else []
        now_lines = [now_line, *self._held_out()]
        parts: list[RenderableType] = [Text(head), *bottleneck, progress, *now_lines, stages, *stall, self._sample]
        return Box(Group(*parts), title="oppo", title_align="left")

    def _held_out(self) -> Iterator[RenderableType]:
        """Yield a line about the evaluations so far, and a bar for the one in progress."""
        if self._evaluated:
            first, last = self._evaluated[0], self._evaluated[-1]
            began = "" if first is last else f", {_short(first.score or math.nan)} at first"
            yield Text(f"{held_out(last.metrics)}{began}")
        done, total = self._answered
        if total:
            yield Text(f"held-out prompts: {done} of {total} responses")
            yield ProgressBar(total=total, completed=done)

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()


def line(report: StepReport, done: int, steps: int) -> str:
    """Return a step in one line."""
    metrics = report.metrics
    parts = [f"step {done}/{steps}", f"score {_short(report.score)}"]
    if "objective/kl" in metrics:
        parts.append(f"kl {_short(metrics['objective/kl'])}")
    if "response_length/mean" in metrics:
        parts.append(f"length {metrics['response_length/mean']:.0f}")
    tokens = metrics.get("response_length/tokens")
    if tokens is not None and report.seconds > 0:
        parts.append(f"{tokens / report.seconds:.0f} tokens/s")
    if "eval/score" in metrics:
        parts.append(held_out(metrics))
    parts.append(f"parked {len(report.deferred)}")
    if report.dropped:
        parts.append(f"dropped {len(report.dropped)}")
    if (found := Bottleneck.of_metrics(metrics, report.seconds)) is not None:
        parts.append(f"{found.largest}-bound")
    return "  ".join([*parts, f"{report.seconds:.2f} s"])


def held_out(metrics: Mapping[str, float]) -> str:
    """Return the held-out score of an evaluation, with half the width of its confidence interval."""
    interval = f" +- {metrics['eval/score_ci95']:.3f}" if "eval/score_ci95" in metrics else ""
    return f"held-out {_short(metrics.get('eval/score', math.nan))}{interval}"


def printable(text: str, limit: int) -> str:
    """Return ``text`` on one line, without control characters, cut to ``limit`` characters."""
    shown = text[:limit].replace("\n", " / ").replace("\t", " ")
    shown = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in shown)
    return shown + ("..." if len(text) > limit else "")


def harmless(text: str) -> str:
    """Return ``text`` without secrets and without control characters other than line ends."""
    return "\n".join(printable(line, len(line)) for line in redacted(text).splitlines())


def _short(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "-"
