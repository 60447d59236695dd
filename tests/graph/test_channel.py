from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import anyio
import pytest
from hypothesis import given, strategies as st

from oppo.errors import ProtocolError
from oppo.graph import join
from oppo.graph.channel import Channel
from oppo.graph.engine import FanOut
from oppo.testing.virtual_time import run_virtual
from tests.kit.virtual import virtually


@dataclass(frozen=True)
class Stretch:
    """Numbers ``start .. stop`` of one lane."""

    lane: str
    start: int
    stop: int


def merge(queued: object, new: object) -> Stretch | None:
    if isinstance(queued, Stretch) and isinstance(new, Stretch) and (queued.lane, queued.stop) == (new.lane, new.start):
        return Stretch(new.lane, queued.start, new.stop)
    return None


@dataclass(frozen=True)
class Mark:
    """An item of a lane that merges with nothing."""

    lane: str


def lane_of(item: Stretch | Mark) -> str:
    return item.lane


def stretches(capacity: int) -> Channel[Stretch | Mark]:
    return Channel("a->b", capacity, merge, lane_of)


async def one_of(channel: Channel[Stretch | Mark]) -> Sequence[Stretch | Mark]:
    async for item in channel:
        return [item]
    return []


@virtually
async def test_drain_takes_everything_queued_at_once() -> None:
    channel = Channel[int]("a->b", 4)
    for item in range(3):
        channel.send_nowait(item)
    assert await channel.drain() == [0, 1, 2]
    assert channel.drain_nowait() == []


def test_a_capacity_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="'a->b' needs a capacity of at least 1, not 0"):
        Channel[int]("a->b", 0)


def test_a_full_channel_merges_before_it_blocks() -> None:
    channel = stretches(2)
    for item in (Stretch("x", 0, 2), Stretch("y", 0, 1), Stretch("x", 2, 5)):
        channel.send_nowait(item)
    assert channel.statistics().merged == 1
    assert channel.drain_nowait() == [Stretch("x", 0, 5), Stretch("y", 0, 1)]


def test_a_channel_with_room_does_not_merge() -> None:
    channel = stretches(2)
    channel.send_nowait(Stretch("x", 0, 2))
    channel.send_nowait(Stretch("x", 2, 5))
    assert channel.drain_nowait() == [Stretch("x", 0, 2), Stretch("x", 2, 5)]


def test_merging_never_jumps_over_an_item_of_the_same_key() -> None:
    channel = stretches(2)
    channel.send_nowait(Stretch("x", 0, 2))
    channel.send_nowait(Mark("x"))
    with pytest.raises(anyio.WouldBlock):
        channel.send_nowait(Stretch("x", 2, 5))


@virtually
async def test_an_item_that_has_been_read_is_not_merged_with() -> None:
    channel = stretches(2)
    for item in (Stretch("x", 0, 1), Stretch("y", 0, 1), Stretch("y", 1, 2)):
        channel.send_nowait(item)
    assert await one_of(channel) == [Stretch("x", 0, 1)]
    channel.send_nowait(Stretch("x", 1, 2))
    channel.send_nowait(Stretch("x", 2, 3))
    assert channel.drain_nowait() == [Stretch("y", 0, 2), Stretch("x", 1, 3)]


@virtually
async def test_many_cancelled_senders_pass_their_places_on() -> None:
    channel = Channel[int]("a->b", 2)
    channel.send_nowait(0)
    channel.send_nowait(1)
    async with anyio.create_task_group() as others:
        async with anyio.create_task_group() as cancelled:
            for item in range(2, 6):
                cancelled.start_soon(channel.send, item)
            await anyio.wait_all_tasks_blocked()
            others.start_soon(channel.send, 6)
            await anyio.wait_all_tasks_blocked()
            cancelled.cancel_scope.cancel()
            assert channel.drain_nowait() == [0, 1]  # keeps places for two of those, which never run again
        assert await channel.drain() == [6]
    assert channel.statistics().waiting_senders == 0
    assert channel.offer(7)


def test_without_a_key_only_the_newest_item_is_merged_with() -> None:
    channel = Channel[Stretch]("a->b", 2, merge)
    channel.send_nowait(Stretch("x", 0, 2))
    channel.send_nowait(Stretch("y", 0, 2))
    channel.send_nowait(Stretch("y", 2, 3))
    with pytest.raises(anyio.WouldBlock):
        channel.send_nowait(Stretch("x", 2, 5))


@virtually
async def test_merging_passes_those_in_line_but_not_those_of_its_own_key() -> None:
    channel = stretches(1)
    channel.send_nowait(Stretch("x", 0, 1))
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.send, Mark("y"))
        await anyio.wait_all_tasks_blocked()
        channel.send_nowait(Stretch("x", 1, 2))
        tasks.start_soon(channel.send, Mark("x"))
        await anyio.wait_all_tasks_blocked()
        with pytest.raises(anyio.WouldBlock):
            channel.send_nowait(Stretch("x", 2, 3))
        got = [item for _ in range(3) for item in await channel.drain()]
    assert got == [Stretch("x", 0, 2), Mark("y"), Mark("x")]


@virtually
async def test_senders_in_line_are_admitted_in_order_and_never_beyond_the_capacity() -> None:
    channel = Channel[int]("a->b", 2)
    async with anyio.create_task_group() as tasks:
        for item in range(9):
            tasks.start_soon(channel.send, item)
        await anyio.wait_all_tasks_blocked()
        assert channel.statistics().waiting_senders == 7
        got: list[int] = []
        while len(got) < 9:
            got += await channel.drain()
    assert got == list(range(9))
    assert channel.statistics().peak == 2


@virtually
async def test_nobody_overtakes_a_sender_that_has_been_admitted() -> None:
    channel = Channel[int]("a->b", 1)
    channel.send_nowait(0)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(channel.send, 1)
        await anyio.wait_all_tasks_blocked()
        assert channel.drain_nowait() == [0]
        assert not channel.offer(2)
        with pytest.raises(anyio.WouldBlock):
            channel.send_nowait(2)
    assert channel.drain_nowait() == [1]


@pytest.mark.parametrize("read", [Channel.drain, Channel.__anext__])
@virtually
async def test_a_cancelled_read_loses_nothing(read: Callable[[Channel[int]], Awaitable[object]]) -> None:
    channel = Channel[int]("a->b", 4)
    scope = anyio.CancelScope()

    async def cancelled() -> None:
        with scope:
            await read(channel)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(cancelled)
        await anyio.wait_all_tasks_blocked()
        assert channel.statistics().waiting_receivers == 1
        scope.cancel()
        channel.send_nowait(1)  # wakes the reader, which never runs again
    assert channel.drain_nowait() == [1]
    assert channel.statistics().waiting_receivers == 0


def test_sending_after_close_is_an_error() -> None:
    channel = Channel[int]("a->b", 1)
    channel.close()
    with pytest.raises(ProtocolError, match="'a->b' after it had been closed"):
        channel.send_nowait(1)


@virtually
async def test_close_wakes_a_sender_in_line_with_an_error() -> None:
    channel = Channel[int]("a->b", 1)
    channel.send_nowait(0)
    with pytest.RaisesGroup(ProtocolError):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(channel.send, 1)
            await anyio.wait_all_tasks_blocked()
            channel.close()
    assert channel.drain_nowait() == [0]
    assert channel.statistics().waiting_senders == 0


@virtually
async def test_a_sender_that_always_merges_lets_the_reader_run() -> None:
    channel = stretches(1)
    got: list[Stretch | Mark] = []

    async def read() -> None:
        got.extend([item async for item in channel])

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(read)
        for start in range(100):
            await channel.send(Stretch("x", start, start + 1))
        channel.close()
    assert len(got) > 10


@virtually
async def test_a_fan_out_serves_those_with_room_before_it_waits_for_a_full_one() -> None:
    full, free = Channel[int]("a->b", 1), Channel[int]("a->c", 1)
    full.send_nowait(0)
    told: list[int] = []
    fan = FanOut("a", [full, free], {}, told.append)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(fan.send, 1)
        await anyio.wait_all_tasks_blocked()
        assert free.drain_nowait() == [1]
        assert told == []
        assert full.drain_nowait() == [0]
    assert full.drain_nowait() == [1]
    assert free.drain_nowait() == []
    assert told == [1]


@given(
    st.lists(st.sampled_from("xyz"), max_size=60),
    st.integers(1, 5),
    st.lists(st.floats(0, 1), min_size=1),
    st.booleans(),
)
@virtually
async def test_nothing_is_lost_doubled_or_reordered_within_a_key(
    lanes: list[str], capacity: int, pace: list[float], drained: bool
) -> None:
    channel = stretches(capacity)
    reached = dict.fromkeys("xyz", 0)

    async def send(lane: str) -> None:
        for start in range(lanes.count(lane)):
            await anyio.sleep(pace[(start + ord(lane)) % len(pace)])
            await channel.send(Stretch(lane, start, start + 1))

    async def send_all() -> None:
        async with anyio.create_task_group() as senders:
            for lane in "xyz":
                senders.start_soon(send, lane)
        channel.close()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_all)
        while items := await (channel.drain() if drained else one_of(channel)):
            for item in items:
                assert isinstance(item, Stretch)
                assert item.start == reached[item.lane]
                reached[item.lane] = item.stop
            await anyio.sleep(pace[0])
    now = channel.statistics()
    assert reached == {lane: lanes.count(lane) for lane in "xyz"}
    assert now.sent == now.received + now.merged == len(lanes)
    assert now.peak <= capacity


def number(item: object) -> int | None:
    """Return the key of an item: negative numbers and words have none."""
    return abs(int(item)) if isinstance(item, float | int) and item >= 0 else None


async def send_all(channel: Channel[float], items: Sequence[float], pause: float = 0.0) -> None:
    for item in items:
        await anyio.sleep(pause)
        await channel.send(item)
    channel.close()


def channels(count: int, capacity: int = 2) -> list[Channel[float]]:
    return [Channel[float](f"{k}->join", capacity) for k in range(count)]


@virtually
async def test_rows_come_as_soon_as_they_are_complete() -> None:
    a, b = channels(2)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_all, a, [1, 2, 3])
        tasks.start_soon(send_all, b, [3, 1, 2], 1.0)
        rows = [(anyio.current_time(), row) async for row in join(a, b, key=number)]
    assert rows == [(1.0, (3, 3)), (2.0, (1, 1)), (3.0, (2, 2))]


@given(st.permutations(range(12)), st.permutations(range(12)), st.permutations(range(12)), st.integers(1, 3))
@virtually
async def test_no_order_of_the_inputs_blocks_a_join(a: list[int], b: list[int], c: list[int], capacity: int) -> None:
    lanes = channels(3, capacity)
    async with anyio.create_task_group() as tasks:
        for lane, items in zip(lanes, (a, b, c), strict=True):
            tasks.start_soon(send_all, lane, items)
        rows = [row async for row in join(lanes[0], lanes[1], lanes[2], key=number)]
    assert sorted(rows) == [(n, n, n) for n in range(12)]


@virtually
async def test_items_of_the_primary_without_a_key_go_aside() -> None:
    a, b = channels(2, 8)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(send_all, a, [-1, 5, -2])
        tasks.start_soon(send_all, b, [5, -3])
        aside: list[float] = []
        assert [row async for row in join(a, b, key=number, aside=aside.append)] == [(5, 5)]
    assert aside == [-1, -2]


@virtually
async def test_a_join_does_not_wait_for_other_inputs_to_close() -> None:
    a, b = channels(2)
    a.send_nowait(1)
    a.close()
    b.send_nowait(1)
    assert [row async for row in join(a, b, key=number)] == [(1, 1)]
    assert not b.ended


@virtually
async def test_an_input_that_ends_without_a_key_is_an_error() -> None:
    a, b = channels(2)
    a.send_nowait(1)
    a.send_nowait(2)
    b.send_nowait(2)
    b.close()
    rows = join(a, b, key=number)
    assert await anext(rows) == (2, 2)
    with pytest.raises(ProtocolError, match="input 2 of a join ended without an item for 1"):
        await anext(rows)


@pytest.mark.parametrize("items", [(1, 1), (1.5, 1)])
@virtually
async def test_a_key_that_comes_twice_is_an_error(items: tuple[float, float]) -> None:
    a, b = channels(2)
    for item in items:
        b.send_nowait(item)
    with pytest.raises(ProtocolError, match="input 2 of a join has a second item for 1"):
        await anext(join(a, b, key=number))


@virtually
async def test_a_key_that_comes_again_after_its_row_is_an_error() -> None:
    a, b = channels(2)
    a.send_nowait(1)
    b.send_nowait(1)
    rows = join(a, b, key=number)
    assert await anext(rows) == (1, 1)
    b.send_nowait(1)
    with pytest.raises(ProtocolError, match="input 2 of a join has a second item for 1"):
        await anext(rows)


@virtually
async def test_items_for_keys_that_the_primary_never_names_are_passed_over() -> None:
    a, b = channels(2)
    a.close()
    b.send_nowait(4)
    assert [row async for row in join(a, b, key=number)] == []


@virtually
async def test_a_cancelled_join_loses_nothing_and_watches_nothing() -> None:
    a, b = channels(2)
    a.send_nowait(1)
    rows = join(a, b, key=number)
    with anyio.move_on_after(1):
        await anext(rows)
    assert a.statistics().waiting_receivers == b.statistics().waiting_receivers == 0
    b.send_nowait(1)
    assert await anext(rows) == (1, 1)


FEW, MANY = 20, 400


@dataclass(frozen=True)
class Item:
    lane: int
    length: int = 1


def cost_merge(queued: Item, new: Item) -> Item | None:
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
        channel = Channel[Item]("a->b", capacity, cost_merge, lanes)
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
