"""Calls on the caller's own thread, so that virtual time accounts for everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import anyio.lowlevel

from oppo.observe import work_context
from oppo.placement.place import Place
from oppo.scheduling import Priority

P = ParamSpec("P")
R = TypeVar("R")


class Inline(Place):
    """The caller's own thread, for tests and for instances whose calls take no time worth mentioning.

    A longer call holds up the event loop, and with it every other stage.

    Example:
        >>> async def main() -> int:
        ...     return await Inline("length").host("abc").call("measure", len)
        >>> anyio.run(main)
        3
    """

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run ``work`` at once, whatever its priority: there is no queue."""
        del priority
        self._require_open("place", label)
        await anyio.lowlevel.checkpoint()  # other tasks take a turn before the loop is held up
        with self._reported(track, label, work_context()):
            return work(*args, **kwargs)
