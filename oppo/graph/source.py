"""The input of a graph: pulled item by item, across steps."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence

import anyio

from oppo.errors import ProtocolError
from oppo.graph.channel import ChannelStatistics
from oppo.graph.topology import SOURCE


class Source:
    """A receiver that takes one item from an iterable per read, never ahead.

    It lives as long as the run: the end of a step neither closes it nor loses an item. It has one reader and cannot be
    joined.

    Args:
        items: sync or async; iterated on the event loop, and never closed here.
    """

    def __init__(self, items: Iterable[object] | AsyncIterable[object]) -> None:
        self._items: Iterator[object] | AsyncIterator[object] = (
            aiter(items) if isinstance(items, AsyncIterable) else iter(items)
        )
        self._taken = 0
        self._waiting = 0
        self._ended = False

    async def drain(self) -> Sequence[object]:
        """Return one item; empty only at the end."""
        if self._ended:
            return []
        self._waiting += 1
        try:
            item = await anext(self._items) if isinstance(self._items, AsyncIterator) else next(self._items)
        except (StopIteration, StopAsyncIteration):
            self._ended = True
            return []
        finally:
            self._waiting -= 1
        self._taken += 1
        return [item]

    def __aiter__(self) -> AsyncIterator[object]:
        return self

    async def __anext__(self) -> object:
        for item in await self.drain():
            return item
        raise StopAsyncIteration

    def drain_nowait(self) -> Sequence[object]:
        """Raise ``ProtocolError``: taking an item may have to wait."""
        raise ProtocolError(f"{SOURCE!r} is read with `async for` or `drain()`; put a stage between it and a join")

    @property
    def ended(self) -> bool:
        """Whether a read has found the end of the items."""
        return self._ended

    def watch(self, event: anyio.Event) -> None:
        """Do nothing: an iterable does not announce its items."""

    def unwatch(self, event: anyio.Event) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing: the reader continues in its next step."""

    def describe(self) -> str:
        """Return its line of the channel table."""
        state = "ended" if self._ended else "waited for" if self._waiting else "idle"
        return f"{SOURCE:<32} {self._taken:>4} taken {state}"

    def statistics(self) -> ChannelStatistics:
        """Return the counters over the whole run."""
        return ChannelStatistics(self._taken, self._taken, 0, 0, 0, 0, 0, self._waiting)
