"""The latest steps in time: the models' work for each, its cut, and how many rollouts that carried over."""

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
        spans: of the models' work for the step, in the order of their ends.
        beside: of their work for others that overlaps the step in time; empty without lookahead.
    """

    index: int
    start: float
    end: float
    cut: float | None
    carried: int
    spans: Sequence[Span]
    beside: Sequence[Span] = ()


@dataclass(slots=True)
class _Cut:
    at: float | None = None
    carried: int = 0


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
        self._new: list[Span] = []  # guarded by the lock
        self._work: list[Span] = []  # for steps that have not ended, and what may lie beside them
        self._whole: Span | None = None
        self._cuts: dict[int, _Cut] = {}

    def model_span(self, span: Span) -> None:
        """Keep a model's span; safe to call from any thread."""
        with self._lock:
            self._new.append(span)

    def take(self) -> list[Span]:
        """Return the models' spans since the last call; each belongs to the step that it names."""
        with self._lock:
            spans, self._new = self._new, []
        self._work += [span for span in spans if span.step is not None]
        return spans

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Keep the time of the step's last finish or deferral, and count its deferrals."""
        if stage == self._source and isinstance(item, Finish | Defer):
            cut = self._cuts.setdefault(step, _Cut())
            cut.at = at
            cut.carried += isinstance(item, Defer)

    def on_span(self, span: Span) -> None:
        """Keep the span of the whole step."""
        if span.kind == "step":
            self._whole = span

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Complete a step."""
        del result, channels
        self.complete(step)

    def complete(self, step: int) -> Sequence[Span]:
        """Keep the step that is over, and return the models' spans since the last call."""
        spans, whole, cut = self.take(), self._whole, self._cuts.get(step, _Cut())
        if whole is not None:
            own = tuple(span for span in self._work if span.step == step)
            beside = tuple(
                span for span in self._work if span.step != step and span.end > whole.start and span.start < whole.end
            )
            self.steps.append(TimedStep(step, whole.start, whole.end, cut.at, cut.carried, own, beside))
            # No later step begins before this one did.
            self._work = [span for span in self._work if span.end > whole.start]
        self._whole = None
        self._cuts = {later: each for later, each in self._cuts.items() if later > step}
        return spans
