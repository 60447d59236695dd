"""The protocols of a stage: any object with an ``async def run``, and optional hooks.

::

    async def run(self, a: Receiver[A], b: Receiver[B], *, out: Sender[O]) -> None

``run`` has one to four inputs. It is called once a step and returns when its inputs have ended; the executor then
closes its output. It may have keywords: ``step: Step`` receives the current step, and any other,
``again: Receiver[E] | None = None``, is an input by name, which a graph may connect.

Hooks are found by their names: :class:`Observing`, :class:`Stateful`, :class:`Demanding`, and those of an async context
manager, which a run enters when it opens and leaves, shielded from cancellation, when it closes. A stage need not keep
the state of a step: two executions of a graph can be alive.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

from oppo.graph.channel import Receiver, Sender
from oppo.graph.step import Step

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
O = TypeVar("O")  # noqa: E741 - O for output
A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)
O_co = TypeVar("O_co", covariant=True)
R_contra = TypeVar("R_contra", contravariant=True)


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
class Demanding(Protocol):
    """A stage that needs more of its graph than the types of its inputs say."""

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Return a sentence for each thing that is wrong; asked when a graph is built.

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
