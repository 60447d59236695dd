"""What a graph reads from outside: pulled item by item, across steps."""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator, Iterable, Iterator, Sequence

import anyio

from oppo.errors import ProtocolError
from oppo.graph.channel import ChannelStatistics
from oppo.graph.topology import SOURCE


class Source:
    """A receiver that takes an item from an iterable when it is asked for one, and never ahead.

    It lives as long as the run: a step that ends neither closes it nor loses its place. It has one reader, and is not
    one of the inputs of a join.

    Args:
        items: sync or async; taken from on the event loop, and never closed here.
    """

    def __init__(self, items: Iterable[object] | AsyncIterable[object]) -> None:
        self._items: Iterator[object] | AsyncIterator[object] = (
            aiter(items) if isinstance(items, AsyncIterable) else iter(items)
        )
        self._taken = 0
        self._waiting = 0
        self._ended = False

    async def drain(self) -> Sequence[object]:
        """Return one item; empty only when there are no more."""
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
        """Refuse: taking an item may have to wait.

        Raises:
            ProtocolError: always.
        """
        raise ProtocolError(
            f"{SOURCE!r} is taken from with `async for` or `drain()`; put a stage between it and whatever joins it"
        )

    @property
    def ended(self) -> bool:
        """Whether the items have run out, as far as has been asked."""
        return self._ended

    def watch(self, event: anyio.Event) -> None:
        """Do nothing: what has not been asked for does not announce itself."""

    def unwatch(self, event: anyio.Event) -> None:
        """Do nothing."""

    def abandon(self) -> None:
        """Do nothing: a reader that returns takes on in its next step."""

    def describe(self) -> str:
        """Return a line for the channel table."""
        state = "ended" if self._ended else "waited for" if self._waiting else "not asked"
        return f"{SOURCE:<32} {self._taken:>4} taken {state}"

    def statistics(self) -> ChannelStatistics:
        """Return the counters over the whole run."""
        return ChannelStatistics(self._taken, self._taken, 0, 0, 0, 0, 0, self._waiting)
