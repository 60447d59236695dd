"""The latest steps in time: the models' spans, the cut, and how many rollouts it carried over."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from oppo.events import Defer, Finish
from oppo.observe import Observer, Span


@dataclass(frozen=True, slots=True)
class TimedStep:
    """One step; all times in seconds on the clock of :mod:`oppo.observe`.

    Attributes:
        index: of the step in its run, from 0.
        start, end: of the whole step.
        cut: when the last rollout finished or was deferred; ``None`` without one.
        carried: rollouts that the cut carried into the next step.
        spans: of the models, in the order of their ends; the first may have begun before the step.
    """

    index: int
    start: float
    end: float
    cut: float | None
    carried: int
    spans: Sequence[Span]


class Timekeeper(Observer):
    """An observer that keeps the latest steps; a listener to models in threads of their own.

    Args:
        source: the stage whose items are the rollouts' events.
        kept: how many steps are kept.
    """

    def __init__(self, *, source: str = "generate", kept: int = 2) -> None:
        self.steps: deque[TimedStep] = deque(maxlen=kept)
        self._source = source
        self._lock = threading.Lock()
        self._spans: list[Span] = []  # guarded by the lock
        self._whole: Span | None = None
        self._cut: float | None = None
        self._carried = 0

    def model_span(self, span: Span) -> None:
        """Keep a model's span; safe to call from any thread."""
        with self._lock:
            self._spans.append(span)

    def take(self) -> list[Span]:
        """Return and forget the models' spans since the last step or call."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Keep the time of the last finish or deferral, and count deferrals."""
        del step
        if stage == self._source and isinstance(item, Finish | Defer):
            self._cut = at
            self._carried += isinstance(item, Defer)

    def on_span(self, span: Span) -> None:
        """Keep the span of the whole step."""
        if span.track == "step":
            self._whole = span

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Complete a step."""
        del result, channels
        self.complete(step)

    def complete(self, step: int) -> Sequence[Span]:
        """Keep the step that is over, and return the models' spans in it."""
        spans, whole = self.take(), self._whole
        if whole is not None:
            self.steps.append(TimedStep(step, whole.start, whole.end, self._cut, self._carried, tuple(spans)))
        self._whole, self._cut, self._carried = None, None, 0
        return spans
