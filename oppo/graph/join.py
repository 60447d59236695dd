"""Reading several inputs at once, aligned by key.

A join makes no task: one wait watches all inputs, so an error or a cancellation leaves nothing running.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Sequence
from typing import Any, TypeVar, overload

from oppo.errors import ProtocolError
from oppo.graph.channel import Key, Receiver, changed

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")


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
            self._require_complete()
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

    def _require_complete(self) -> None:
        # An input that has ended can no longer match a key of the primary.
        for number, lane in enumerate(self._lanes):
            if self._missing[number] and lane.ended:
                keys = ", ".join(repr(key) for key in self._held[0] if key not in self._held[number])
                raise ProtocolError(f"input {number + 1} of a join ended without an item for {keys}")
