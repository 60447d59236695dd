"""Looking at a run without touching it: the clock off the loop, spans of work, and the observer protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

now: Callable[[], float] = time.monotonic
"""Seconds on the clock used off the event loop: monotonic, the same in every process of one machine."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that took time on one track (a stage's or a model's).

    Attributes:
        track: who worked, for example ``reward``.
        label: what it did, for example ``extend``.
        start, end: seconds on the clock :data:`now`; virtual seconds for stages under a virtual-time loop.
        details: counts worth showing, for example ``{"tokens": 96}``.
    """

    track: str
    label: str
    start: float
    end: float
    details: Mapping[str, float] = field(default_factory=dict)


SpanListener: TypeAlias = Callable[[Span], None]
"""Called with each span when it ends, from the thread in which the work was done."""


def ignore(span: Span) -> None:
    """Listen to nothing."""
    del span


def silent(sentence: str) -> None:
    """Tell nobody."""
    del sentence


class Observer(Protocol):
    """Told what happens in a run, on its event loop; must not block and must not raise."""

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """``stage`` has sent ``item`` into its output, or has returned it from ``observe``, at loop time ``at``."""

    def on_span(self, span: Span) -> None:
        """A stage's execution, or a whole step (track ``step``), is over."""

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """A step is over; ``channels`` holds each channel's counters by ``source->target``."""
