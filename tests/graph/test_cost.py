"""What an operation costs does not grow with how much is queued, waits or is held: counted, not timed."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import anyio
import pytest

from oppo.graph import join
from oppo.graph.channel import Channel
from oppo.simulate.engine import run_virtual

FEW, MANY = 20, 400


@dataclass(frozen=True)
class Item:
    lane: int
    length: int = 1


def merge(queued: Item, new: Item) -> Item | None:
    return Item(queued.lane, queued.length + new.length) if queued.lane == new.lane else None


class Lanes:
    """Tells the lane of an item, and counts how often it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self, item: Item) -> int:
        self.asked += 1
        return item.lane


class Key:
    """A key that counts how often any of them is looked up."""

    looked_up = 0

    def __init__(self, number: int) -> None:
        self.number = number

    def __hash__(self) -> int:
        Key.looked_up += 1
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Key) and other.number == self.number


def asked_per_item(capacity: int, read: Callable[[Channel[Item]], Awaitable[object]]) -> float:
    """Send thrice what a channel holds, twice over: to be queued, to be merged, to stand in line."""
    lanes = Lanes()

    async def main() -> None:
        channel = Channel[Item]("a->b", capacity, merge, lanes)
        async with anyio.create_task_group() as senders:
            for _ in range(2):
                for lane in range(capacity):
                    senders.start_soon(channel.send, Item(lane))
            await anyio.wait_all_tasks_blocked()
            assert channel.statistics().merged == capacity
            for lane in range(capacity, 2 * capacity):
                senders.start_soon(channel.send, Item(lane))
            await anyio.wait_all_tasks_blocked()
            assert channel.statistics().waiting_senders == capacity
            while channel.statistics().received < 2 * capacity:
                await read(channel)

    run_virtual(main)
    return lanes.asked / (3 * capacity)


@pytest.mark.parametrize("read", [Channel.drain, Channel.__anext__])
def test_a_full_channel_asks_for_as_many_keys_an_item_however_much_is_queued(
    read: Callable[[Channel[Item]], Awaitable[object]],
) -> None:
    assert asked_per_item(MANY, read) <= asked_per_item(FEW, read) + 1


def looked_up_per_row(rows: int) -> float:
    """Join two inputs of which one has ended and the other comes item by item."""

    async def main() -> None:
        first, second, third = (Channel[Key](f"{name}->join", rows) for name in "abc")
        for number in range(rows):
            first.send_nowait(Key(number))
            second.send_nowait(Key(number))
        first.close()
        second.close()
        Key.looked_up = 0

        async def trickle() -> None:
            for number in range(rows):
                await anyio.sleep(1)
                await third.send(Key(number))
            third.close()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trickle)
            assert len([row async for row in join(first, second, third, key=lambda item: item)]) == rows

    run_virtual(main)
    return Key.looked_up / rows


def test_a_join_looks_up_as_many_keys_a_row_however_many_it_holds() -> None:
    assert looked_up_per_row(MANY) <= looked_up_per_row(FEW) + 1
