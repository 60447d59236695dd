"""A function that is given to a call and stays with the caller: the work calls it, and it is carried out at home."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Generic, ParamSpec, TypeVar

from oppo.placement.wire import Packet, pack

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class Callback(Generic[P, R]):
    """An argument of :meth:`Hosted.call` that the work calls while the call lasts; not kept afterwards.

    In :class:`~oppo.placement.Inline` and :class:`~oppo.placement.Thread` it is a plain call. In
    :class:`~oppo.placement.Process` the child sends the arguments, and this process carries the function out, in the
    thread that waits for the answer of the call; arguments and results must be picklable. What the function raises
    there ends the call, as itself. A call with callbacks has had effects here, so a place with ``restarts`` refuses it.

    Args:
        function: safe to be called from another thread.
        oneway: returns nothing, and the work does not wait until it has been carried out.

    Example:
        >>> Callback("abc".index)("c")
        2
    """

    function: Callable[P, R]
    oneway: bool = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what the function returns."""
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Stub:
    """What crosses to the child in the place of a callback: which of the call's it is."""

    number: int
    oneway: bool


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """What a child sends in the middle of a call: the arguments for a callback."""

    stub: Stub
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What a callback returned."""

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class Refusal:
    """A callback has failed: the child is to end the call."""


class Callbacks:
    """The callbacks among the arguments of one call.

    Attributes:
        error: what the first that failed has raised; none is carried out after it.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._callbacks: list[Callback[..., object]] = []

    def __len__(self) -> int:
        return len(self._callbacks)

    def stub(self, argument: object) -> object:
        """Return what crosses in the place of ``argument``: itself, unless it is a callback."""
        if not isinstance(argument, Callback):
            return argument
        self._callbacks.append(argument)
        return Stub(len(self._callbacks) - 1, argument.oneway)

    def carry_out(self, request: Request) -> Packet | None:
        """Return what to send to the child: nothing where it does not wait, and nothing more after a failure."""
        if self.error is not None:
            return None
        try:
            value = self._callbacks[request.stub.number](*request.args, **request.kwargs)
            return None if request.stub.oneway else pack(Reply(value))
        except BaseException as error:  # noqa: BLE001 - the call raises it
            self.error = error
            return pack(Refusal())
