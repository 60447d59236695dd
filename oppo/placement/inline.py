"""Calls on the caller's own thread, so that virtual time accounts for everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import anyio.lowlevel

from oppo import observe
from oppo.errors import ModelLost
from oppo.placement.place import Hosted, Journal, LocalInstance, Place, reported
from oppo.scheduling import DEFAULT_TIME_SLICE, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Inline(Place):
    """The caller's own thread, for tests and for instances whose calls take no time worth mentioning.

    A longer call holds up the event loop, and with it every other stage. A closed place refuses further calls.

    Args:
        name: shown in traces and errors.
        listener: called with the span of each call.
        time_slice: how long a call should last that nothing waits for.

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

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run ``work`` at once, whatever its priority: there is no queue.

        Raises:
            ModelLost: the place is closed.
        """
        del priority
        if not self._open:
            raise ModelLost(f"the place {self.name!r} is closed, so it cannot do {label!r}")
        await anyio.lowlevel.checkpoint()  # other tasks take a turn before the loop is held up
        with reported(self, track, label):
            return work(*args, **kwargs)

    def host(self, instance: T, *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Return a handle to ``instance``, which is lost only with the caller; ``journal`` records nothing."""
        del journal
        return LocalInstance(self, instance, track or self.name)

    def close(self) -> None:
        """Refuse further calls; idempotent."""
        self._open = False
