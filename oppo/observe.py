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


class Notices:
    """Sentences about what goes on, for those that listen at the time.

    Attributes:
        listeners: called with each sentence, from any thread.
    """

    def __init__(self, *listeners: Callable[[str], None]) -> None:
        self.listeners = list(listeners)

    def __call__(self, sentence: str) -> None:
        """Pass a sentence on."""
        for listener in self.listeners:
            listener(sentence)


class Observer(Protocol):
    """Told what happens in a run, on its event loop; must not block and must not raise."""

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """``stage`` has sent ``item`` into its output, or has returned it from ``observe``, at loop time ``at``."""

    def on_span(self, span: Span) -> None:
        """A stage's execution, or a whole step (track ``step``), is over."""

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """A step is over; ``channels`` holds each channel's counters by ``source->target``."""


class Expendable(Observer):
    """An observer that may fail alone: after its first error it is left out, and the run goes on.

    Args:
        observer: may raise.
        tell: called with a sentence about its error.
    """

    def __init__(self, observer: Observer, tell: Callable[[str], None]) -> None:
        self._observer = observer
        self._tell = tell
        self._works = True

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Pass it on."""
        self._pass_on(lambda: self._observer.on_item(step, stage, item, at))

    def on_span(self, span: Span) -> None:
        """Pass it on."""
        self._pass_on(lambda: self._observer.on_span(span))

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Pass it on."""
        self._pass_on(lambda: self._observer.on_step(step, result, channels))

    def _pass_on(self, say: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            say()
        except Exception as error:  # noqa: BLE001 - the boundary around what a run can do without
            self._works = False
            self._tell(f"{type(self._observer).__name__} has failed and is left out: {type(error).__name__}: {error}")
