"""Stages and steps: any object with an ``async def run`` is a stage; a step is one execution of every stage.

::

    async def run(self, a: Receiver[A], b: Receiver[B], *, out: Sender[O]) -> None

``run`` has one input or more; a type checker knows those of up to three. It is called once a step and returns when its
inputs have ended; the executor then closes its output. It may have keywords: ``step: Step`` receives the current step,
and any other, ``again: Receiver[E] | None = None``, is an input by name, which a graph may connect.

Hooks are found by their names: :class:`Observing`, :class:`Stateful`, :class:`Demanding`, and those of an async context
manager, which a run enters when it opens and leaves, shielded from cancellation, when it closes. A stage need not keep
the state of a step: two executions of a graph can be alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeAlias, TypeVar, TypeVarTuple, runtime_checkable

import anyio

from oppo.errors import GraphError
from oppo.graph.channel import Receiver, Sender
from oppo.observe import Role, Span, SpanListener, WorkContext, silent, work_context, working_for


class StepLink:
    """One step among those that are alive: which of its stages have returned, and the links of the steps next to it."""

    def __init__(self, stages: Sequence[str], before: StepLink | None = None, lookahead: int = 0) -> None:
        self.returned = {name: anyio.Event() for name in stages}
        self.followed = anyio.Event()  # set once `after` is known
        self.before = before
        self.after: StepLink | None = None  # the next step; none if that begins when this one has ended
        self.lookahead = lookahead
        self.over = anyio.Event()  # set once no task of the step is left
        self.failed = False  # also if it was cancelled because an earlier one had
        if before is not None:
            before.after = self
            before.followed.set()

    def fail(self) -> None:
        """Note that the step is over without a result: none follows, and earlier ones wait for none of its stages."""
        self.failed = True
        self.followed.set()
        for event in self.returned.values():
            event.set()

    def end(self) -> None:
        if self.after is not None:
            self.after.before = None

    async def previous(self, stages: Sequence[str]) -> None:
        self._require_known(stages)
        before = self.before
        if before is not None:
            await before.all_returned(stages)
            if before.failed:
                await anyio.sleep_forever()  # until the error of that step is raised, which cancels this one

    async def later(self, stages: Sequence[str]) -> None:
        self._require_known(stages)
        link: StepLink = self
        for _ in range(self.lookahead):
            if link.failed:
                await link.all_behind_over()
                return
            await link.followed.wait()
            if link.after is None:
                return
            link = link.after
            await link.all_returned(stages)

    async def all_behind_over(self) -> None:
        # It has failed, so they are being cancelled.
        link = self.after
        while link is not None:
            await link.over.wait()
            link = link.after

    async def settled(self, stages: Sequence[str]) -> None:
        self._require_known(stages)
        await self.all_returned(stages)
        await self.later(stages)

    async def all_returned(self, stages: Sequence[str]) -> None:
        for stage in stages:
            await self.returned[stage].wait()

    def _require_known(self, stages: Sequence[str]) -> None:
        for stage in stages:
            if stage not in self.returned:
                known = ", ".join(map(repr, self.returned))
                raise GraphError(f"a stage waits for {stage!r} of another step, but the stages are {known}")


M = TypeVar("M")

UNKNOWN: Final = sys.maxsize  # remaining steps of a run without a known end


ChannelCounters: TypeAlias = Mapping[str, Mapping[str, int]]
"""The counters of each channel, by ``source->target``."""

Gauge: TypeAlias = Callable[[], float]
"""Returns a measurement of the process, for example the worst delay of its event loop since the last call."""


@dataclass(slots=True, eq=False)
class StepRuntime:
    """The run's side of a step, one for all of its stages; not for the stages themselves."""

    records: dict[type, list[tuple[str, Any]]] = field(default_factory=dict)  # by class, with the name of the stage
    link: StepLink | None = None
    work: list[Span] = field(default_factory=list)  # of this step and of those alive beside it
    listener: SpanListener = silent  # gets each span of the work
    gauges: Mapping[str, Gauge] = field(default_factory=dict)
    channels: Callable[[], ChannelCounters] = dict
    notify: Callable[[str, object], None] = lambda stage, item: None


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
        runtime: the run's side of the step; stages use its methods.

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
        self.runtime.work.append(span)
        self.runtime.listener(span)

    @property
    def work(self) -> Sequence[Span]:
        """The work that stages recorded in this step and in those alive beside it so far, in the order of its ends.

        The work of this step alone is ``recorded(Span)``.
        """
        return tuple(self.runtime.work)

    @property
    def gauges(self) -> Mapping[str, Gauge]:
        """The gauges of the run (:meth:`oppo.Graph.open`), by metric."""
        return self.runtime.gauges

    def channels(self) -> ChannelCounters:
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
        """Wait until the stages have returned in the step before; an unknown name raises ``GraphError``."""
        if self.runtime.link is not None:
            await self.runtime.link.previous(stages)

    async def later(self, *stages: str) -> None:
        """Wait until the stages have returned in every later step that begins before this one has ended.

        Which steps these are does not depend on timing: as many as the run looks ahead, fewer before its end and before
        it drains. A stage must not wait so for one that depends on itself.
        """
        if self.runtime.link is not None:
            await self.runtime.link.later(stages)

    async def settled(self, *stages: str) -> None:
        """Wait until the stages have returned in this step, and in every later one as :meth:`later` does."""
        if self.runtime.link is not None:
            await self.runtime.link.settled(stages)


A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
O = TypeVar("O")  # noqa: E741 - O for output
Inputs = TypeVarTuple("Inputs")
O_co = TypeVar("O_co", covariant=True)
R_contra = TypeVar("R_contra", contravariant=True)


class _Plain(Protocol[*Inputs, O_co]):
    async def run(self, *inputs: *Inputs, out: Sender[O_co]) -> None: ...


class _Stepped(Protocol[*Inputs, O_co]):
    async def run(self, *inputs: *Inputs, out: Sender[O_co], step: Step) -> None: ...


Stage1: TypeAlias = _Plain[Receiver[A], O] | _Stepped[Receiver[A], O]
"""A stage of one input."""

Stage2: TypeAlias = _Plain[Receiver[A], Receiver[B], O] | _Stepped[Receiver[A], Receiver[B], O]
"""A stage of two inputs, read through :func:`oppo.graph.join`."""

Stage3: TypeAlias = (
    _Plain[Receiver[A], Receiver[B], Receiver[C], O] | _Stepped[Receiver[A], Receiver[B], Receiver[C], O]
)
"""A stage of three inputs, read through :func:`oppo.graph.join`."""


class AnyStage(Protocol):
    """A stage whose number and types of inputs are not known statically."""

    @property
    def run(self) -> Callable[..., Coroutine[Any, Any, None]]:
        """Called with one receiver for each input, and ``out``."""


@runtime_checkable
class Observing(Protocol[R_contra]):
    """A stage that observes the result of each step, after every stage has returned."""

    def observe(self, result: R_contra, step: Step, /) -> object:
        """Observe the result of a step; the run passes the returned value, unless ``None``, to its observers."""


@runtime_checkable
class Demanding(Protocol):
    """A stage that needs more of its graph than the types of its inputs say."""

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Return a message for each thing that is wrong; asked when a graph is built.

        Args:
            stages: all of the graph.
            named: keywords of ``run`` under which this stage is given an input.
        """


@runtime_checkable
class Stateful(Protocol):
    """A stage with state between steps, which a resumed run restores."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return plain values and arrays; called between two steps."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another stage of this class; called before the first step."""
