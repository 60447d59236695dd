"""The step as a stage sees it, and what the run that executes it gives to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeAlias, TypeVar

import anyio

from oppo.graph.step_link import StepLink
from oppo.observe import Role, Span, SpanListener, WorkContext, silent, work_context, working_for

M = TypeVar("M")

UNKNOWN: Final = sys.maxsize
"""Remaining steps of a run without a known end."""


ChannelCounters: TypeAlias = Mapping[str, Mapping[str, int]]
"""The counters of each channel, by ``source->target``."""

Gauge: TypeAlias = Callable[[], float]
"""Returns a measurement of the process, for example the worst delay of its event loop since the last call."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkLog:
    """The latest work of a run's stages, and its listener."""

    spans: list[Span] = field(default_factory=list)
    tell: SpanListener = silent

    def add(self, span: Span) -> None:
        """Keep a piece of work, and tell of it."""
        self.spans.append(span)
        self.tell(span)


def _nobody(stage: str, item: object) -> None:
    """Discard the item."""
    del stage, item


@dataclass(slots=True, eq=False)
class StepRuntime:
    """The run's side of a step, one for all of its stages; not for the stages themselves.

    Attributes:
        records: of the stages, by class, each with the name of its stage.
        link: to the steps that are alive beside it; ``None`` outside of a run.
        work: of this step and of those alive beside it.
        gauges: of the run (:meth:`oppo.Graph.open`), by metric.
        channels: returns the counters of the step's channels so far.
        notify: tells the run's observers of an item, under the name of a stage.
    """

    records: dict[type, list[tuple[str, Any]]] = field(default_factory=dict)
    link: StepLink | None = None
    work: WorkLog = field(default_factory=WorkLog)
    gauges: Mapping[str, Gauge] = field(default_factory=dict)
    channels: Callable[[], ChannelCounters] = dict
    notify: Callable[[str, object], None] = _nobody


@dataclass(frozen=True, slots=True)
class Step:
    """One execution of a graph, as passed to one of its stages.

    A stage records its measurements as values of a class of its own; another stage reads them by class. All of them are
    recorded when ``observe`` is called.

    Attributes:
        index: ordinal in the run, from 0.
        remaining: number of steps left to run, this one included; ``UNKNOWN`` without a known end.
        started: loop time, in seconds.
        stage: name of the stage it is passed to.
        ahead: number of earlier steps that had not ended when it began; 0 without lookahead.
        runtime: what the run gives to it; its stages use the methods.

    Example:
        >>> step = Step(0, 10, started=0.0)
        >>> step.of("reward").record(0.5)
        >>> step.recorded(float)
        [('reward', 0.5)]
    """

    index: int
    remaining: int
    started: float
    stage: str = ""
    ahead: int = 0
    runtime: StepRuntime = field(default_factory=StepRuntime, repr=False)

    @property
    def number(self) -> int:
        """Its ordinal for people, from 1: the number of completed steps once it has ended."""
        return self.index + 1

    @property
    def observed(self) -> int:
        """The number of steps whose results had been observed when it began."""
        return self.index - self.ahead

    def of(self, stage: str) -> Step:
        """Return this step as passed to another stage; all stages share the records."""
        return replace(self, stage=stage)

    def record(self, measure: object) -> None:
        """Record a measurement of the stage under its class."""
        self.runtime.records.setdefault(type(measure), []).append((self.stage, measure))

    def recorded(self, kind: type[M]) -> list[tuple[str, M]]:
        """Return the records of this class, each with the name of its stage, in the order of recording."""
        return list(self.runtime.records.get(kind, ()))

    def note(self, item: object) -> None:
        """Have the run's observers notice an item as they notice those that the stage sends; no stage reads it."""
        self.runtime.notify(self.stage, item)

    @contextmanager
    def working(self, role: Role, label: str = "") -> Iterator[None]:
        """Record the body as work of the stage, when it has come to its end; the run's observers get its span.

        The spans of the models that it calls have its step and role.

        Args:
            role: of the work in the step.
            label: of the span; the role by default.

        Example:
            >>> async def run(self, batches, *, out, step):
            ...     async for batch in batches:
            ...         with step.working("update"):
            ...             await self.trainer.update(batch)
        """
        start, context = anyio.current_time(), WorkContext(self.index, role)
        outer = work_context()  # the steps of an evaluation are none of the run that is evaluated
        with working_for(outer if outer.role == "evaluate" else context):
            yield
        span = context.span(self.stage, label or role, start, anyio.current_time())
        self.record(span)
        self.runtime.work.add(span)

    @property
    def work(self) -> Sequence[Span]:
        """The work that stages recorded in this step and in those alive beside it so far, in the order of its ends.

        That of this step alone is ``recorded(Span)``.
        """
        return tuple(self.runtime.work.spans)

    @property
    def gauges(self) -> Mapping[str, Gauge]:
        """The gauges of the run (:meth:`oppo.Graph.open`), by metric."""
        return self.runtime.gauges

    def channels(self) -> ChannelCounters:
        """Return the counters of each channel in this step so far."""
        return self.runtime.channels()

    @property
    def lookahead(self) -> int:
        """The number of later steps that may begin before this one has ended."""
        return 0 if self.runtime.link is None else self.runtime.link.lookahead

    @property
    def followed(self) -> bool:
        """Whether a later step has begun; whether one has, by the end of this step, does not depend on timing."""
        return self.runtime.link is not None and self.runtime.link.after is not None

    async def previous(self, *stages: str) -> None:
        """Wait until the stages have returned in the step before.

        Raises:
            GraphError: a name is unknown.
        """
        if self.runtime.link is not None:
            await self.runtime.link.previous(stages)

    async def later(self, *stages: str) -> None:
        """Wait until the stages have returned in every later step that begins before this one has ended.

        Which steps these are does not depend on timing: as many as the run looks ahead, fewer before its end and before
        it drains. A stage must not wait so for one that depends on itself.

        Raises:
            GraphError: a name is unknown.
        """
        if self.runtime.link is not None:
            await self.runtime.link.later(stages)

    async def settled(self, *stages: str) -> None:
        """Wait until the stages have returned in this step, and in every later one as :meth:`later` does.

        Raises:
            GraphError: a name is unknown.
        """
        if self.runtime.link is not None:
            await self.runtime.link.settled(stages)
