"""Work done on the caller itself: nothing is waited for but the work, so virtual time knows all that happens."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar

import anyio.lowlevel

from oppo import observe
from oppo.errors import ModelLost
from oppo.placement.place import Hosted, Journal, reported
from oppo.scheduling import DEFAULT_TIME_SLICE, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Inline:
    """The caller's own thread, for tests and for instances whose work takes no time worth speaking of.

    Anything longer holds up the event loop, and with it every other stage.

    Args:
        name: shown in traces and errors.
        listener: called with the span of each call.
        time_slice: how long a call should last that nobody waits for.

    Example:
        >>> async def main() -> int:
        ...     return await Inline("length").host("abc").call("measure", len)
        >>> anyio.run(main)
        3
    """

    def __init__(
        self,
        name: str,
        *,
        listener: observe.SpanListener = observe.ignore,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
    ) -> None:
        self.name = name
        self.listener = listener
        self.time_slice = time_slice
        self.at_work = ""
        self._open = True

    def host(self, instance: T, *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Give ``instance`` a home; it is lost with the caller only, so nothing is noted in a journal."""
        del journal
        return _InlineHosted(self, instance, track)

    def require_open(self, label: str) -> None:
        """Raise unless the place is open.

        Raises:
            ModelLost: it has been closed.
        """
        if not self._open:
            raise ModelLost(f"the place {self.name!r} is closed, so it cannot do {label!r}")

    def close(self) -> None:
        """Refuse further calls; idempotent."""
        self._open = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _InlineHosted(Generic[T]):
    def __init__(self, place: Inline, instance: T, track: str) -> None:
        self._place = place
        self._instance = instance
        self._track = track

    @property
    def time_slice(self) -> TimeSlice:
        return self._place.time_slice

    def at(self, priority: Priority) -> Hosted[T]:
        del priority  # there is no queue
        return self

    async def call(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        self._place.require_open(label)
        await anyio.lowlevel.checkpoint()  # others have their turn before the loop is held up
        with reported(self._place, self._track, label):
            return work(self._instance, *args, **kwargs)

    call_local = call
