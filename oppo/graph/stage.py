"""The protocols of a stage: any object with an ``async def run``, and optional hooks.

::

    async def run(self, a: Receiver[A], b: Receiver[B], *, out: Sender[O]) -> None

``run`` has one to four inputs. It is called once a step and returns when its inputs have ended; the executor then
closes its output. It may have keywords: ``step: Step`` receives the current step, and any other,
``again: Receiver[E] | None = None``, is an input by name, which a graph may connect.

Hooks are found by their names: :class:`Observing`, :class:`Stateful`, and those of an async context manager, which a
run enters when it opens and leaves, shielded from cancellation, when it closes. A stage need not keep the state of a
step: two executions of a graph can be alive.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

import anyio

from oppo.graph.channel import Receiver, Sender
from oppo.graph.turn import Turn
from oppo.observe import Span, SpanListener, silent

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
M = TypeVar("M")
O = TypeVar("O")  # noqa: E741 - O for output
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)
O_co = TypeVar("O_co", covariant=True)
R_contra = TypeVar("R_contra", contravariant=True)


UNKNOWN: Final = sys.maxsize
"""Remaining steps of a run without a known end."""


Counters: TypeAlias = Mapping[str, Mapping[str, int]]
"""The counters of each channel, by ``source->target``."""

Gauge: TypeAlias = Callable[[], float]
"""Returns a measurement of the process, for example the worst delay of its event loop since the last call."""


@dataclass(frozen=True, slots=True, eq=False)
class WorkLog:
    """The latest work of a run's stages, and who is told of it."""

    spans: list[Span] = field(default_factory=list)
    tell: SpanListener = silent

    def add(self, span: Span) -> None:
        """Keep a piece of work, and tell of it."""
        self.spans.append(span)
        self.tell(span)


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
        gauges: of the run (:meth:`oppo.Graph.open`), by metric.

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
    gauges: Mapping[str, Gauge] = field(default_factory=dict, repr=False)
    _records: dict[type, list[tuple[str, Any]]] = field(default_factory=dict, repr=False)
    _turn: Turn | None = field(default=None, repr=False)
    _work: WorkLog = field(default_factory=WorkLog, repr=False)
    _channels: Callable[[], Counters] = field(default=dict, repr=False)

    @property
    def observed(self) -> int:
        """The number of steps whose results had been observed when it began."""
        return self.index - self.ahead

    def of(self, stage: str) -> Step:
        """Return this step as passed to another stage; all stages share the records."""
        return replace(self, stage=stage)

    def record(self, measure: object) -> None:
        """Record a measurement of the stage under its class."""
        self._records.setdefault(type(measure), []).append((self.stage, measure))

    def recorded(self, kind: type[M]) -> list[tuple[str, M]]:
        """Return the records of this class, each with the name of its stage, in the order of recording."""
        return list(self._records.get(kind, ()))

    @contextmanager
    def working(self, label: str, **details: float) -> Iterator[None]:
        """Note the body as work of the stage, when it has come to its end; the run's observers get its span.

        ``details`` are counts worth showing in it, for example ``tokens``.

        Example:
            >>> async def run(self, batches, *, out, step):
            ...     async for batch in batches:
            ...         with step.working("update"):
            ...             await self.trainer.update(batch)
        """
        start = anyio.current_time()
        yield
        self._work.add(Span(self.stage, label, start, anyio.current_time(), {**details, "step": self.index}))

    @property
    def work(self) -> Sequence[Span]:
        """The work that stages noted in this step and in those alive beside it so far, in the order of its ends."""
        return tuple(self._work.spans)

    def channels(self) -> Counters:
        """Return the counters of each channel in this step so far."""
        return self._channels()

    @property
    def lookahead(self) -> int:
        """The number of later steps that may begin before this one has ended."""
        return 0 if self._turn is None else self._turn.lookahead

    @property
    def followed(self) -> bool:
        """Whether a later step has begun; whether one has, by the end of this step, does not depend on timing."""
        return self._turn is not None and self._turn.after is not None

    async def previous(self, *stages: str) -> None:
        """Wait until the stages have returned in the step before.

        Raises:
            GraphError: a name is unknown.
        """
        if self._turn is not None:
            await self._turn.previous(stages)

    async def later(self, *stages: str) -> None:
        """Wait until the stages have returned in every later step that begins before this one has ended.

        Which steps these are does not depend on timing: as many as the run looks ahead, fewer before its end and before
        it drains. A stage must not wait so for one that depends on itself.

        Raises:
            GraphError: a name is unknown.
        """
        if self._turn is not None:
            await self._turn.later(stages)

    def note_return(self) -> None:
        """Note that the stage it is passed to has returned: in the next step it may begin."""
        if self._turn is not None:
            self._turn.returned[self.stage].set()


class _Plain1(Protocol[A_contra, O_co]):
    async def run(self, a: Receiver[A_contra], /, *, out: Sender[O_co]) -> None: ...


class _Stepped1(Protocol[A_contra, O_co]):
    async def run(self, a: Receiver[A_contra], /, *, out: Sender[O_co], step: Step) -> None: ...


class _Plain2(Protocol[A_contra, B_contra, O_co]):
    async def run(self, a: Receiver[A_contra], b: Receiver[B_contra], /, *, out: Sender[O_co]) -> None: ...


class _Stepped2(Protocol[A_contra, B_contra, O_co]):
    async def run(self, a: Receiver[A_contra], b: Receiver[B_contra], /, *, out: Sender[O_co], step: Step) -> None: ...


class _Plain3(Protocol[A_contra, B_contra, C_contra, O_co]):
    async def run(
        self, a: Receiver[A_contra], b: Receiver[B_contra], c: Receiver[C_contra], /, *, out: Sender[O_co]
    ) -> None: ...


class _Stepped3(Protocol[A_contra, B_contra, C_contra, O_co]):
    async def run(
        self, a: Receiver[A_contra], b: Receiver[B_contra], c: Receiver[C_contra], /, *, out: Sender[O_co], step: Step
    ) -> None: ...


class _Plain4(Protocol[A_contra, B_contra, C_contra, D_contra, O_co]):
    async def run(
        self,
        a: Receiver[A_contra],
        b: Receiver[B_contra],
        c: Receiver[C_contra],
        d: Receiver[D_contra],
        /,
        *,
        out: Sender[O_co],
    ) -> None: ...


class _Stepped4(Protocol[A_contra, B_contra, C_contra, D_contra, O_co]):
    async def run(
        self,
        a: Receiver[A_contra],
        b: Receiver[B_contra],
        c: Receiver[C_contra],
        d: Receiver[D_contra],
        /,
        *,
        out: Sender[O_co],
        step: Step,
    ) -> None: ...


Stage1: TypeAlias = _Plain1[A, O] | _Stepped1[A, O]
"""A stage of one input."""

Stage2: TypeAlias = _Plain2[A, B, O] | _Stepped2[A, B, O]
"""A stage of two inputs, read through :func:`oppo.graph.join`."""

Stage3: TypeAlias = _Plain3[A, B, C, O] | _Stepped3[A, B, C, O]
"""A stage of three inputs, read through :func:`oppo.graph.join`."""

Stage4: TypeAlias = _Plain4[A, B, C, D, O] | _Stepped4[A, B, C, D, O]
"""A stage of four inputs, read through :func:`oppo.graph.join`."""


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
class Stateful(Protocol):
    """A stage with state between steps, which a resumed run restores."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return plain values and arrays; called between two steps."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of another stage of this class; called before the first step."""
