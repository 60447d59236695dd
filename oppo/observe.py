"""Observation of a run: the clock off the event loop, spans of work, and the observer protocol."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, Literal, Protocol, TypeAlias, TypeVar

from oppo.log import logger

T = TypeVar("T")

now: Callable[[], float] = time.monotonic
"""Seconds on the clock used off the event loop: monotonic, shared by all processes of a machine."""


Role: TypeAlias = Literal["decode", "score", "update", "evaluate", "other"]
"""A work's contribution to a step: tokens, scores, new weights (weight sync included), an evaluation beside it, or
something else.
"""

SpanKind: TypeAlias = Literal["work", "execution", "step"]
"""The extent of a span: a piece of work, one execution of a stage with its waits, or a whole step."""


@dataclass(frozen=True, slots=True)
class Span:
    """An interval on one track.

    Attributes:
        track: the stage or model at work, for example ``reward``.
        label: of the work, for example ``extend``.
        start, end: seconds on the clock :data:`now`; virtual seconds for stages under a virtual-time loop.
        step: that the work was done for; ``None`` outside of a step.
        role: of the work in that step; ``None`` if no stage noted it as work.
        kind: what the span covers.
    """

    track: str
    label: str
    start: float
    end: float
    step: int | None = None
    role: Role | None = None
    kind: SpanKind = "work"


@dataclass(frozen=True, slots=True)
class WorkContext:
    """The step that a call is made for, and its role in it: carried by the task's context, not by the call."""

    step: int | None = None
    role: Role | None = None

    def span(self, track: str, label: str, start: float, end: float) -> Span:
        return Span(track, label, start, end, self.step, self.role)


_NO_WORK: Final = WorkContext()
_CONTEXT: Final[ContextVar[WorkContext]] = ContextVar("oppo.work_context", default=_NO_WORK)


def work_context() -> WorkContext:
    """Return what the current task works for. Threads do not inherit it: read it before handing work to one."""
    return _CONTEXT.get()


@contextmanager
def set_to(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def working_for(context: WorkContext) -> AbstractContextManager[None]:
    return set_to(_CONTEXT, context)


SpanListener: TypeAlias = Callable[[Span], None]
"""Called with each span when it ends, from the thread of the work."""


def silent(report: object) -> None:
    del report


class Reporter:
    """Reports the work of a model that lives in no place, as a place reports its calls.

    Args:
        track: of its spans.

    Attributes:
        listener: called with the span of each piece of work when it ends.

    Example:
        >>> spans: list[Span] = []
        >>> policy = Reporter("policy")
        >>> policy.listener = spans.append
        >>> with policy.reported("decode"), policy.reported("load"):
        ...     policy.at_work
        'policy: load'
        >>> [span.label for span in spans]
        ['load', 'decode']
    """

    def __init__(self, track: str) -> None:
        self._track = track
        self._labels: list[str] = []
        self.listener: SpanListener = silent

    @property
    def at_work(self) -> str:
        """The work in progress that began last, as ``track: label``; empty when there is none."""
        labels = self._labels[-1:]
        return f"{self._track}: {labels[0]}" if labels else ""

    @contextmanager
    def reported(self, label: str) -> Iterator[None]:
        start = now()
        self._labels.append(label)
        try:
            yield
        finally:
            self._labels.remove(label)
            self.listener(work_context().span(self._track, label, start, now()))


class Observer(Protocol):
    """Receives the events of a run, on its event loop; must not block and must not raise.

    One that derives from this class leaves out what it does not need.
    """

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """``stage`` sent ``item`` into its output, noted it, or returned it from ``observe``, at loop time ``at``."""
        del step, stage, item, at

    def on_span(self, span: Span) -> None:
        """A stage's execution, a piece of its work, or a whole step ended: ``span.kind`` says which."""
        del span

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """A step ended; ``channels`` holds each channel's counters by ``source->target``."""
        del step, result, channels


class Expendable(Observer):
    """An observer whose failure the run survives: its first error disables it."""

    def __init__(self, observer: Observer) -> None:
        self._observer = observer
        self._works = True

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        self._pass_on(lambda: self._observer.on_item(step, stage, item, at))

    def on_span(self, span: Span) -> None:
        self._pass_on(lambda: self._observer.on_span(span))

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        self._pass_on(lambda: self._observer.on_step(step, result, channels))

    def _pass_on(self, notify: Callable[[], None]) -> None:
        if not self._works:
            return
        try:
            notify()
        except Exception as error:  # noqa: BLE001 - the boundary around what a run does not need
            self._works = False
            logger.warning(
                f"{type(self._observer).__name__} has failed and is left out: {type(error).__name__}: {error}"
            )


Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Occupation:
    """Busy seconds of each role; spans that overlap count once.

    Attributes:
        decode, score, update: seconds in which at least one track of the role was busy.
        exposed: seconds in which a scorer was busy while nothing decoded or trained.
    """

    decode: float
    score: float
    update: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The fraction of the scoring time hidden behind decoding or training, 0 to 1; NaN without scoring."""
        return 1 - self.exposed / self.score if self.score else math.nan


def occupation(work: Iterable[Span], beside: Iterable[Span] = ()) -> Occupation:
    """Return the busy seconds of each role in the work of stages, or of models.

    Args:
        work: that counts; spans of other roles and of none are left out.
        beside: other work, of which decoding and training hide scoring, and which counts for nothing else.

    Example:
        >>> spans = [Span("actor", "decode", 0, 3, role="decode"), Span("reward", "extend", 2, 4, role="score")]
        >>> occupation(spans).hidden
        0.5
    """
    work = list(work)
    decode, score, update = busy(work, "decode"), busy(work, "score"), busy(work, "update")
    hiding = union([*decode, *update, *busy(beside, "decode", "update")])
    exposed = seconds(union([*score, *hiding])) - seconds(hiding)
    return Occupation(seconds(decode), seconds(score), seconds(update), max(0.0, exposed))


def busy(work: Iterable[Span], *roles: Role) -> list[Interval]:
    return union((span.start, span.end) for span in work if span.role in roles)


def union(intervals: Iterable[Interval], *, gap: float = 0.0) -> list[Interval]:
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def seconds(disjoint: Sequence[Interval]) -> float:
    return math.fsum(end - start for start, end in disjoint)
