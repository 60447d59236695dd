"""One output, several readers: each has its own channel, and none misses an item."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

T = TypeVar("T")
T_contra = TypeVar("T_contra", contravariant=True)


class Target(Protocol[T_contra]):
    """What a fan-out delivers to: a channel, or whatever else takes items one by one."""

    def offer(self, item: T_contra, /) -> bool:
        """Take ``item`` if that needs neither waiting nor merging; return whether it was taken."""

    async def send(self, item: T_contra, /) -> None:
        """Take ``item``, when there is room for it."""


class FanOut(Generic[T]):
    """Delivers each item to every target: at once to those with room, then to the others as they have some.

    Args:
        told: called with each item once all targets have it.
    """

    def __init__(self, targets: Sequence[Target[T]], told: Callable[[T], None] | None = None) -> None:
        self._targets = targets
        self._told = told

    async def send(self, item: T, /) -> None:
        """Deliver ``item`` to every target; see :meth:`Sender.send` for what a cancellation means."""
        for target in [target for target in self._targets if not target.offer(item)]:
            await target.send(item)
        if self._told is not None:
            self._told(item)
