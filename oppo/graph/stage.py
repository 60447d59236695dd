"""What a stage is: any object with an ``async def run``, and hooks if it wants them.

::

    async def run(self, a: Receiver[A], b: Receiver[B], *, out: Sender[O]) -> None

``run`` has one to four inputs. It is called once a step and returns when its inputs have ended; the executor then
closes its output. Two kinds of keywords are found in its signature: ``step: Step`` is given the step that is run, and
any other, ``again: Receiver[E] | None = None``, is an input by name, which a graph may connect.

The hooks are optional, and found by their names. Nothing of a step need be kept on a stage: two executions of a graph
can be alive.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

from oppo.graph.channel import Receiver, Sender

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
"""Steps that remain in a run without a stated end."""


@dataclass(frozen=True, slots=True)
class Step:
    """One execution of a graph, as one of its stages knows it.

    A stage records what it measures, as a value of a class of its own. The stage that makes the result, or one that
    observes it, asks for the measures of a class. All measures of an execution are there when ``observe`` is called.

    Attributes:
        index: ordinal in the run, from 0.
        remaining: how many executions were asked for, this one and those after it; ``UNKNOWN`` without a stated end.
        started: loop time, in seconds.
        stage: name of the stage that is given this.

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
    _records: dict[type, list[tuple[str, Any]]] = field(default_factory=dict, repr=False)

    def of(self, stage: str) -> Step:
        """Return this as another stage knows it; what any of them records, all can ask for."""
        return replace(self, stage=stage)

    def record(self, measure: object) -> None:
        """Keep what the stage has measured, for those who ask for its class."""
        self._records.setdefault(type(measure), []).append((self.stage, measure))

    def recorded(self, kind: type[M]) -> list[tuple[str, M]]:
        """Return the measures of this class so far, each with the name of its stage, in the order they were made."""
        return list(self._records.get(kind, ()))


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
        """Take note of the result of a step that is over; the run passes what is returned on to its observers."""


@runtime_checkable
class Stateful(Protocol):
    """A stage that holds, between two steps, what another process would need to go on in its place."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return plain values and arrays, asked between two steps."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what another stage of this class was at; called before the first step."""


@runtime_checkable
class Opened(Protocol):
    """A stage that owns something for as long as a run is open: any async context manager."""

    async def __aenter__(self) -> object:
        """Called when the run opens."""

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: types.TracebackType | None,
        /,
    ) -> bool | None:
        """Called when the run closes, shielded from cancellation."""


def has_hooks(stage: object) -> bool:
    """Whether ``stage`` keeps something between steps, as far as its hooks tell."""
    return isinstance(stage, Observing | Stateful | Opened)
