"""Functions passed to a call that stay with the caller: calling one sends a request back to the caller's process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, ParamSpec, TypeVar

from oppo.placement.wire import Call, Packet, pack

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True, slots=True, eq=False)
class Callback(Generic[P, R]):
    """An argument of :meth:`Hosted.call` that the work may call until the call ends.

    In :class:`~oppo.placement.Inline` and :class:`~oppo.placement.Thread` it is a plain call. In
    :class:`~oppo.placement.Process`, or in a place on another machine, the child sends the arguments, and this process
    runs the function, in the thread that waits for the answer of the call; arguments and results must be picklable. An
    error of the function ends the call and is raised as itself. Callbacks have side effects here, so a place with
    ``restarts`` refuses them.

    Args:
        function: safe to be called from another thread.
        oneway: it returns nothing, and the work does not wait for it to run.
    """

    function: Callable[P, R]
    oneway: bool = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return what the function returns."""
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Stub:
    """Crosses to the child in place of a callback, with its number among those of the call."""

    number: int
    oneway: bool


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Sent by a child in the middle of a call: the arguments for a callback."""

    stub: Stub
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """What a callback returned."""

    value: object


@dataclass(frozen=True, slots=True, eq=False)
class Refusal:
    """A callback failed, so the child must end the call."""


class Callbacks:
    """The callbacks among the arguments of one call.

    Attributes:
        error: of the first callback that failed; none runs after it.
    """

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._callbacks: list[Callback[..., object]] = []

    def __len__(self) -> int:
        return len(self._callbacks)

    def extract(self, call: Call) -> Call:
        """Return ``call`` with a stub in place of each callback, which is kept here."""
        kwargs = {name: self._stub(value) for name, value in call.kwargs.items()}
        return replace(call, args=tuple(map(self._stub, call.args)), kwargs=kwargs)

    def _stub(self, argument: object) -> object:
        if not isinstance(argument, Callback):
            return argument
        self._callbacks.append(argument)
        return Stub(len(self._callbacks) - 1, argument.oneway)

    def run(self, request: Request) -> Packet | None:
        """Run a callback; return the message for the child: none for a one-way callback, or after a failure."""
        if self.error is not None:
            return None
        try:
            value = self._callbacks[request.stub.number](*request.args, **request.kwargs)
            return None if request.stub.oneway else pack(Reply(value))
        except BaseException as error:  # noqa: BLE001 - the call raises it
            self.error = error
            return pack(Refusal())
