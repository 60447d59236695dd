"""Bounded, lossless channels: each connects a stage's output to one reader.

The ``_nowait`` form of each operation is the logic; the async form waits around it. A channel does not know what its
items mean: the graph's ``merge`` function decides which items may become one. A join reads several channels at once,
aligned by key.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeAlias, TypeVar, overload

import anyio
import anyio.lowlevel

from oppo.errors import ProtocolError

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
T_contra = TypeVar("T_contra", contravariant=True)

# One function serves all edges of a graph, so items have no static type here.
Merge: TypeAlias = Callable[[Any, Any], Any]
"""``merge(queued, new)``: the one item that stands for both, or ``None`` where they must stay two."""
Key: TypeAlias = Callable[[Any], Hashable | None]
"""``key(item)``: items of equal key keep their order; ``None`` for an item that is never merged."""


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """The counters of one channel; ``sent == received + merged + queued`` at all times.

    Attributes:
        sent: items accepted from the sender.
        received: items handed to the reader.
        merged: accepted items that became part of a queued one.
        queued: items waiting to be read.
        peak: largest number queued so far.
        capacity: largest number that can be queued.
        waiting_senders: tasks waiting for room.
        waiting_receivers: tasks waiting for an item.
    """

    sent: int
    received: int
    merged: int
    queued: int
    peak: int
    capacity: int
    waiting_senders: int
    waiting_receivers: int


class Receiver(Protocol[T_co]):
    """The reading end of an edge; one stage reads it. Cancelling a read loses nothing: the items stay queued."""

    def __aiter__(self) -> AsyncIterator[T_co]:
        """Return an iterator over the items; it ends when the sending stage has returned."""

    async def drain(self) -> Sequence[T_co]:
        """Wait for at least one item and return everything queued; empty only when the input has ended."""

    def drain_nowait(self) -> Sequence[T_co]:
        """Return everything queued, possibly nothing."""

    @property
    def ended(self) -> bool:
        """Whether the sender has closed and everything has been read."""

    def watch(self, event: anyio.Event) -> None:
        """Set ``event`` at the next item or at the end."""

    def unwatch(self, event: anyio.Event) -> None:
        """Forget ``event``, watched or not."""

    def statistics(self) -> ChannelStatistics:
        """Return the current counters."""


async def changed(*receivers: Receiver[Any]) -> None:
    event = anyio.Event()
    for receiver in receivers:
        receiver.watch(event)
    try:
        await event.wait()
    finally:
        for receiver in receivers:
            receiver.unwatch(event)


class Sender(Protocol[T_contra]):
    """The writing end: reaches every reader of a stage's output."""

    async def send(self, item: T_contra, /) -> None:
        """Hand over ``item``, waiting while a reader's channel is full.

        Items sent by one task keep their order for every reader. A cancelled send may have reached only some of
        several readers; cancellation from outside tears the step down, so no reader goes on from there.

        Raises:
            ProtocolError: a reader has returned, or this output has been closed.
        """


class Channel(Generic[T]):
    """A bounded queue between one stage and one reader that never loses, doubles or reorders an item.

    A full channel first tries to merge the new item with the newest queued item *of the same key*, which keeps the
    order within a key. Where ``merge`` returns ``None`` the sender waits its turn. Without ``key`` only the newest item
    of all is tried. A send raises ``ProtocolError`` if the channel is closed or its reader has returned.

    Args:
        name: shown in errors and tables, ``source->target``.
        capacity: the most items queued, at least 1.

    Attributes:
        awaits_reader: the reader is busy with an earlier step. Until it begins, a full channel takes items beyond its
            capacity, since the earlier step may in turn wait for the sender; a step's items bound their number.

    Example:
        >>> channel = Channel[int]("a->b", 2)
        >>> channel.send_nowait(7)
        >>> channel.drain_nowait()
        [7]
    """

    def __init__(self, name: str, capacity: int, merge: Merge | None = None, key: Key | None = None) -> None:
        if capacity < 1:
            raise ValueError(f"channel {name!r} needs a capacity of at least 1, not {capacity}")
        self.name = name
        self.capacity = capacity
        self.awaits_reader = False
        self._merge = merge
        self._key = key
        self._queue: deque[T] = deque()
        self._newest: dict[Hashable, int] | None = None
        """Ordinal of the newest queued item of each key; built on first use, dropped at the next drain."""
        self._blocked: OrderedDict[anyio.Event, None] = OrderedDict()
        """Senders waiting for room, in order of arrival."""
        self._reserved = 0
        """Slots reserved for admitted senders whose tasks have still to run."""
        self._waiting_keys: Counter[Hashable] = Counter()
        """Number of blocked or admitted senders by the key of their item."""
        self._watchers: list[anyio.Event] = []
        self.closed = False
        self._abandoned = False
        self._received = self._merged = self._peak = 0

    # Sending. Blocked senders are admitted in order, one for each free slot. An admitted sender fills its reserved slot
    # when its task runs again, so a cancelled one has sent nothing. No operation visits every item or every sender.

    def offer(self, item: T, /) -> bool:
        """Queue ``item`` if there is room, without merging or waiting; return whether it was queued."""
        if self.closed or self._abandoned:
            self._require_open()
        if self._blocked or self._reserved or len(self._queue) >= self.capacity:
            return False
        if self._newest is None and not self._watchers:
            self._queue.append(item)  # as `_append` does, which is most of the cost of an item otherwise
        else:
            self._append(item)
        return True

    def send_nowait(self, item: T, /) -> None:
        """Queue ``item``, or merge it into a queued one; raise ``anyio.WouldBlock`` if the channel is full."""
        if not self.offer(item) and not self._absorb(item):
            raise anyio.WouldBlock

    async def send(self, item: T, /) -> None:
        """Queue ``item``, or merge it into a queued one, waiting while the channel is full.

        A cancelled send has not sent the item.
        """
        if self.offer(item):
            return
        if self._absorb(item):
            # Lets the reader run: a sender whose items all merge never waits otherwise.
            await anyio.lowlevel.cancel_shielded_checkpoint()
        elif self.awaits_reader:
            self._append(item)
        else:
            await self._send_when_admitted(item)

    async def _send_when_admitted(self, item: T) -> None:
        admitted = anyio.Event()
        key = None if self._key is None else self._key(item)
        self._blocked[admitted] = None
        self._waiting_keys[key] += 1
        try:
            await admitted.wait()
            self._require_open()
        except BaseException:
            self._withdraw(admitted, key)
            self._admit()  # the unused slot goes to the next sender
            raise
        self._withdraw(admitted, key)
        self._append(item)

    def _withdraw(self, admitted: anyio.Event, key: Hashable | None) -> None:
        if admitted.is_set():
            self._reserved -= 1
        else:
            del self._blocked[admitted]
        self._waiting_keys[key] -= 1
        if not self._waiting_keys[key]:
            del self._waiting_keys[key]

    def _append(self, item: T) -> None:
        if self._newest is not None and self._key is not None:
            self._newest[self._key(item)] = self._received + len(self._queue)
        self._queue.append(item)
        if self._watchers:
            self._wake()

    def _absorb(self, item: T) -> bool:
        if self._merge is None or (position := self._merge_position(item)) is None:
            return False
        merged = self._merge(self._queue[position], item)
        if merged is None:
            return False
        self._queue[position] = merged
        self._merged += 1
        return True

    def _merge_position(self, item: T) -> int | None:
        if self._key is None:
            return len(self._queue) - 1 if self._queue and not self._blocked and not self._reserved else None
        key = self._key(item)
        if key is None or key in self._waiting_keys:
            return None
        if self._newest is None:
            self._newest = {self._key(queued): n for n, queued in enumerate(self._queue, self._received)}
        ordinal = self._newest.get(key)
        return None if ordinal is None else ordinal - self._received

    def _admit(self) -> None:
        while self._blocked and len(self._queue) + self._reserved < self.capacity:
            admitted, _ = self._blocked.popitem(last=False)
            self._reserved += 1
            admitted.set()

    def _require_open(self) -> None:
        if self.closed:
            raise ProtocolError(f"an item was sent into {self.name!r} after it had been closed")
        if self._abandoned:
            raise ProtocolError(
                f"an item was sent into {self.name!r}, whose reader has returned already; a stage reads each of its "
                f"inputs until it ends"
            )

    def close(self) -> None:
        """End the channel: queued items can still be read, later sends raise; idempotent."""
        self.closed = True
        self._reserved += len(self._blocked)
        while self._blocked:
            self._blocked.popitem(last=False)[0].set()
        self._wake()

    # Reading.

    def abandon(self) -> None:
        """Note that the reader has returned: later sends raise.

        Raises:
            ProtocolError: it left items unread.
        """
        self._abandoned = True
        left = len(self._queue) + len(self._blocked) + self._reserved
        if left:
            raise ProtocolError(
                f"the reader of {self.name!r} returned and left {left} item{'s' * (left > 1)} unread; a stage reads "
                f"each of its inputs until it ends"
            )

    def drain_nowait(self) -> Sequence[T]:
        if not self._queue:
            return []
        items = list(self._queue)
        self._peak = max(self._peak, len(items))
        self._queue.clear()
        self._newest = None
        self._received += len(items)
        self._admit()
        return items

    async def drain(self) -> Sequence[T]:
        await self._readable()
        return self.drain_nowait()

    def __aiter__(self) -> AsyncIterator[T]:
        return self

    async def __anext__(self) -> T:
        if not self._queue:
            await self._readable()
            if not self._queue:
                raise StopAsyncIteration
        self._peak = max(self._peak, len(self._queue))
        item = self._queue.popleft()
        if self._newest is not None and self._key is not None:
            key = self._key(item)
            if self._newest.get(key) == self._received:
                del self._newest[key]
        self._received += 1
        self._admit()
        return item

    async def _readable(self) -> None:
        while not self._queue and not self.closed:
            await changed(self)

    @property
    def ended(self) -> bool:
        return self.closed and not self._queue

    def watch(self, event: anyio.Event) -> None:
        self._watchers.append(event)

    def unwatch(self, event: anyio.Event) -> None:
        if event in self._watchers:
            self._watchers.remove(event)

    def _wake(self) -> None:
        watchers, self._watchers = self._watchers, []
        for event in watchers:
            event.set()

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(
            sent=self._received + self._merged + len(self._queue),
            received=self._received,
            merged=self._merged,
            queued=len(self._queue),
            peak=max(self._peak, len(self._queue)),
            capacity=self.capacity,
            waiting_senders=len(self._blocked) + self._reserved,
            waiting_receivers=len(self._watchers),
        )


@overload
def join(
    a: Receiver[A],
    b: Receiver[B],
    /,
    *,
    key: Callable[[A | B], Hashable | None],
    aside: Callable[[A], object] | None = None,
) -> AsyncIterator[tuple[A, B]]: ...
@overload
def join(
    a: Receiver[A],
    b: Receiver[B],
    c: Receiver[C],
    /,
    *,
    key: Callable[[A | B | C], Hashable | None],
    aside: Callable[[A], object] | None = None,
) -> AsyncIterator[tuple[A, B, C]]: ...
@overload
def join(
    a: Receiver[Any],
    b: Receiver[Any],
    c: Receiver[Any],
    d: Receiver[Any],
    /,
    *more: Receiver[Any],
    key: Key,
    aside: Callable[[Any], object] | None = None,
) -> AsyncIterator[tuple[Any, ...]]: ...
def join(
    *lanes: Receiver[Any], key: Key, aside: Callable[[Any], object] | None = None
) -> AsyncIterator[tuple[Any, ...]]:
    """Return tuples of items of equal key, one from each input, as soon as they are complete.

    All inputs are read at once and held until they match, so a full channel never blocks another. The first input is
    the primary and determines the keys. The join ends when the primary has ended and all of its keys are matched; items
    of other inputs whose keys it lacks are discarded.

    Args:
        lanes: two inputs or more, none of them the source of the graph.
        key: aligns items; ``None`` for an item that belongs to no tuple.
        aside: called with the primary's items without a key, in order; other inputs' are discarded.

    Raises:
        ProtocolError: while it is read: an input repeats a key, or ended without a key of the primary.
    """
    return _Join(lanes, key, aside)


class _Join:
    # No task: one wait watches all inputs, so an error or a cancellation leaves nothing running.

    def __init__(self, lanes: Sequence[Receiver[Any]], key: Key, aside: Callable[[Any], object] | None) -> None:
        self._lanes = lanes
        self._key = key
        self._aside = aside
        self._held: list[dict[Hashable, object]] = [{} for _ in lanes]
        self._missing = [0 for _ in lanes]
        self._matched: set[Hashable] = set()
        self._complete: deque[tuple[object, ...]] = deque()

    def __aiter__(self) -> AsyncIterator[tuple[Any, ...]]:
        return self

    async def __anext__(self) -> tuple[Any, ...]:
        while True:
            for number, lane in enumerate(self._lanes):
                for item in lane.drain_nowait():
                    self._take(number, item)
            if self._complete:
                return self._complete.popleft()
            for number, lane in enumerate(self._lanes):
                if self._missing[number] and lane.ended:  # it can no longer match a key of the primary
                    keys = ", ".join(repr(key) for key in self._held[0] if key not in self._held[number])
                    raise ProtocolError(f"input {number + 1} of a join ended without an item for {keys}")
            if self._lanes[0].ended and not self._held[0]:
                raise StopAsyncIteration
            await changed(*self._lanes)

    def _take(self, number: int, item: object) -> None:
        key = self._key(item)
        if key is None:
            if number == 0 and self._aside is not None:
                self._aside(item)
            return
        if key in self._held[number] or key in self._matched:
            raise ProtocolError(f"input {number + 1} of a join has a second item for {key!r}; each key comes once")
        self._held[number][key] = item
        if number == 0:
            self._missing = [count + (key not in held) for count, held in zip(self._missing, self._held, strict=True)]
        elif key in self._held[0]:
            self._missing[number] -= 1
        if all(key in held for held in self._held):
            self._complete.append(tuple(held.pop(key) for held in self._held))
            self._matched.add(key)


def channel_table(channels: Iterable[Channel[Any]]) -> str:
    """Return one line for each channel: how full it is, and how many tasks wait at either end."""
    lines = []
    for channel in channels:
        now = channel.statistics()
        state = ["closed"] if channel.closed else []
        state += [f"{now.waiting_senders} waiting to send"] if now.waiting_senders else []
        state += [f"{now.waiting_receivers} waiting to receive"] if now.waiting_receivers else []
        lines.append(f"{channel.name:<32} {now.queued:>4}/{now.capacity:<4} {', '.join(state) or 'idle'}")
    return "\n".join(lines)
