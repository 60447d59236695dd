"""What a stage is, and what its ``run`` says about its inputs and its output.

A stage is any object with ``async def run(self, a: Receiver[A], b: Receiver[B], *, out: Sender[O]) -> None``, of one to
five inputs. ``run`` is called once a step and returns when its inputs have ended; the executor then closes its output.
The hooks below are optional, and found by their names.
"""

from __future__ import annotations

import inspect
import sys
import types
import typing
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeAlias, TypeVar, runtime_checkable

from oppo.errors import GraphError
from oppo.graph.channel import Receiver, Sender
from oppo.observe import Span

A_contra = TypeVar("A_contra", contravariant=True)
B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)
D_contra = TypeVar("D_contra", contravariant=True)
E_contra = TypeVar("E_contra", contravariant=True)
O_co = TypeVar("O_co", covariant=True)
R_contra = TypeVar("R_contra", contravariant=True)


class Stage1(Protocol[A_contra, O_co]):
    """A stage of one input."""

    async def run(self, a: Receiver[A_contra], /, *, out: Sender[O_co]) -> None:
        """Read the input until it ends, and send what comes of it."""


class Stage2(Protocol[A_contra, B_contra, O_co]):
    """A stage of two inputs, read through :func:`oppo.graph.join`."""

    async def run(self, a: Receiver[A_contra], b: Receiver[B_contra], /, *, out: Sender[O_co]) -> None:
        """Read the inputs until they end, and send what comes of them."""


class Stage3(Protocol[A_contra, B_contra, C_contra, O_co]):
    """A stage of three inputs, read through :func:`oppo.graph.join`."""

    async def run(
        self, a: Receiver[A_contra], b: Receiver[B_contra], c: Receiver[C_contra], /, *, out: Sender[O_co]
    ) -> None:
        """Read the inputs until they end, and send what comes of them."""


class Stage4(Protocol[A_contra, B_contra, C_contra, D_contra, O_co]):
    """A stage of four inputs, read through :func:`oppo.graph.join`."""

    async def run(
        self,
        a: Receiver[A_contra],
        b: Receiver[B_contra],
        c: Receiver[C_contra],
        d: Receiver[D_contra],
        /,
        *,
        out: Sender[O_co],
    ) -> None:
        """Read the inputs until they end, and send what comes of them."""


class Stage5(Protocol[A_contra, B_contra, C_contra, D_contra, E_contra, O_co]):
    """A stage of five inputs, read through :func:`oppo.graph.join`."""

    async def run(
        self,
        a: Receiver[A_contra],
        b: Receiver[B_contra],
        c: Receiver[C_contra],
        d: Receiver[D_contra],
        e: Receiver[E_contra],
        /,
        *,
        out: Sender[O_co],
    ) -> None:
        """Read the inputs until they end, and send what comes of them."""


class AnyStage(Protocol):
    """A stage whose number and types of inputs are not known statically."""

    @property
    def run(self) -> Callable[..., Coroutine[Any, Any, None]]:
        """Called with one receiver for each input, and ``out``."""


UNKNOWN: Final = sys.maxsize
"""Steps that remain in a run of which nobody has said when it ends."""


@dataclass(frozen=True, slots=True)
class Step:
    """One execution of a graph, as one of its stages is told of it.

    ``spans`` and ``measures`` are one board that the stages of an execution share: whoever measures something puts it
    there, and whoever makes the result or is told of it may read there. It is complete when ``observe`` is called.

    Attributes:
        index: ordinal in the run, from 0.
        remaining: how many executions were asked for, this one and those after it; ``UNKNOWN`` where nobody said.
        started: loop time, in seconds.
        stage: name of the stage that is told.
        spans: when the stages worked, on the loop's clock; each names its stage as its track.
        measures: numbers worth reporting, by name.
    """

    index: int
    remaining: int
    started: float
    stage: str = ""
    spans: list[Span] = field(default_factory=list)
    measures: dict[str, float] = field(default_factory=dict)


@runtime_checkable
class Stepwise(Protocol):
    """A stage that is told of each step before its ``run`` is called."""

    def begin(self, step: Step) -> None:
        """Take note of the step that is about to run."""


@runtime_checkable
class Observing(Protocol[R_contra]):
    """A stage that is told what each step resulted in, after every stage has returned."""

    def observe(self, result: R_contra) -> object:
        """Take note of the result of the step that has just run; what is returned, observers are told."""


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
    return isinstance(stage, Stepwise | Observing | Opened)


Classes: TypeAlias = frozenset[type] | None
"""The nominal classes an item may have; ``None`` where the annotation does not say."""


@dataclass(frozen=True, slots=True)
class Ports:
    """What a stage's ``run`` takes and sends.

    Attributes:
        names: parameter names of the inputs.
        reads: the classes each input may carry.
        variadic: whether ``run`` takes any number of inputs (``*inputs``), all like the last of ``reads``.
        sends: the classes the output may carry.
    """

    names: tuple[str, ...]
    reads: tuple[Classes, ...]
    variadic: bool
    sends: Classes

    @classmethod
    def of(cls, stage: object) -> Ports:
        """Return the ports of ``stage``, read from the signature of its ``run``.

        Raises:
            GraphError: ``stage`` is no stage; the message is the rest of a sentence that begins with its name.
        """
        if isinstance(stage, type):
            raise GraphError(f"is the class {stage.__name__}, not an object of it: write {stage.__name__}(...)")
        run = getattr(stage, "run", None)
        kind = type(stage).__name__
        if not callable(run):
            raise GraphError(f"is no stage: {kind} has no method `async def run(self, ..., *, out)`")
        if not inspect.iscoroutinefunction(run):
            raise GraphError(f"is no stage: {kind}.run must be `async def` and send its items to `out`")
        inputs, variadic = _inputs(run, kind)
        return cls(
            names=tuple(parameter.name for parameter in inputs),
            reads=tuple(_carried(run, parameter.annotation, Receiver) for parameter in inputs),
            variadic=variadic,
            sends=_carried(run, inspect.signature(run).parameters["out"].annotation, Sender),
        )

    def carried(self, position: int) -> Classes:
        """Return the classes that input ``position`` may carry."""
        return self.reads[min(position, len(self.reads) - 1)]

    def accepts(self, count: int) -> bool:
        """Whether ``run`` can be called with ``count`` inputs."""
        return count >= len(self.names) - 1 if self.variadic else count == len(self.names)


def _inputs(run: Callable[..., object], kind: str) -> tuple[list[inspect.Parameter], bool]:
    inputs, variadic = [], False
    parameters = inspect.signature(run).parameters
    if "out" not in parameters or parameters["out"].kind is inspect.Parameter.POSITIONAL_ONLY:
        raise GraphError(f"is no stage: {kind}.run takes no keyword `out: Sender[...]` to send its items to")
    for parameter in parameters.values():
        if parameter.name == "out" or parameter.kind is inspect.Parameter.VAR_KEYWORD:
            continue
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            if parameter.default is inspect.Parameter.empty:
                raise GraphError(f"is no stage: {kind}.run wants the keyword {parameter.name!r}, which nobody passes")
            continue
        variadic = variadic or parameter.kind is inspect.Parameter.VAR_POSITIONAL
        inputs.append(parameter)
    return inputs, variadic


def _carried(run: Callable[..., object], annotation: object, port: type) -> Classes:
    """Return the classes of the items in ``port[item]``, as far as the annotation can be resolved."""
    holder = types.SimpleNamespace(__annotations__={"port": annotation})
    # Annotations may name things imported for type checkers only, or parameters of the class: then nothing is known.
    try:
        resolved = typing.get_type_hints(holder, getattr(run, "__globals__", {}))["port"]
    except (NameError, AttributeError, TypeError, SyntaxError):
        return None
    if typing.get_origin(resolved) is not port:
        return None
    return _classes(typing.get_args(resolved)[0])


def _classes(annotation: object) -> Classes:
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return _classes(typing.get_args(annotation)[0])
    if origin is typing.Union or origin is types.UnionType:
        members = [_classes(member) for member in typing.get_args(annotation)]
        known = [member for member in members if member is not None]
        return frozenset().union(*known) if len(known) == len(members) else None
    found = annotation if origin is None else origin
    if found is None:
        return frozenset((type(None),))
    nominal = isinstance(found, type) and found not in (object, Any) and not getattr(found, "_is_protocol", False)
    return frozenset((typing.cast("type", found),)) if nominal else None


def fits(sent: Classes, read: Classes) -> bool:
    """Whether everything sent can be read; true where one side is unknown."""
    if sent is None or read is None:
        return True
    return all(issubclass(one, tuple(read)) for one in sent)


def in_words(classes: Classes) -> str:
    """Return the names of ``classes``, as an error shows them."""
    return " | ".join(sorted(one.__name__ for one in classes or ())) or "anything"
