from __future__ import annotations

from collections.abc import Sequence

import anyio
import pytest
from hypothesis import given, strategies as st

from oppo.errors import ProtocolError
from oppo.graph import Channel, join, where
from oppo.simulate.engine import run_virtual


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


def test_rows_come_as_soon_as_they_are_complete() -> None:
    async def main() -> None:
        a, b = channels(2)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_all, a, [1, 2, 3])
            tasks.start_soon(send_all, b, [3, 1, 2], 1.0)
            rows = [(anyio.current_time(), row) async for row in join(a, b, key=number)]
        assert rows == [(1.0, (3, 3)), (2.0, (1, 1)), (3.0, (2, 2))]

    run_virtual(main)


@given(st.permutations(range(12)), st.permutations(range(12)), st.permutations(range(12)), st.integers(1, 3))
def test_no_order_of_the_inputs_blocks_a_join(a: list[int], b: list[int], c: list[int], capacity: int) -> None:
    async def main() -> None:
        lanes = channels(3, capacity)
        async with anyio.create_task_group() as tasks:
            for lane, items in zip(lanes, (a, b, c), strict=True):
                tasks.start_soon(send_all, lane, items)
            rows = [row async for row in join(lanes[0], lanes[1], lanes[2], key=number)]
        assert sorted(rows) == [(n, n, n) for n in range(12)]

    run_virtual(main)


def test_items_of_the_primary_without_a_key_go_aside() -> None:
    async def main() -> None:
        a, b = channels(2, 8)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_all, a, [-1, 5, -2])
            tasks.start_soon(send_all, b, [5, -3])
            aside: list[float] = []
            assert [row async for row in join(a, b, key=number, aside=aside.append)] == [(5, 5)]
        assert aside == [-1, -2]

    run_virtual(main)


def test_a_join_does_not_wait_for_other_inputs_to_close() -> None:
    async def main() -> None:
        a, b = channels(2)
        a.send_nowait(1)
        a.close()
        b.send_nowait(1)
        assert [row async for row in join(a, b, key=number)] == [(1, 1)]
        assert not b.ended

    run_virtual(main)


def test_an_input_that_ends_without_a_key_is_an_error() -> None:
    async def main() -> None:
        a, b = channels(2)
        a.send_nowait(1)
        a.send_nowait(2)
        b.send_nowait(2)
        b.close()
        rows = join(a, b, key=number)
        assert await anext(rows) == (2, 2)
        with pytest.raises(ProtocolError, match="input 2 of a join ended without an item for 1"):
            await anext(rows)

    run_virtual(main)


@pytest.mark.parametrize("items", [(1, 1), (1.5, 1)])
def test_a_key_that_comes_twice_is_an_error(items: tuple[float, float]) -> None:
    async def main() -> None:
        a, b = channels(2)
        for item in items:
            b.send_nowait(item)
        with pytest.raises(ProtocolError, match="input 2 of a join has a second item for 1"):
            await anext(join(a, b, key=number))

    run_virtual(main)


def test_a_key_that_comes_again_after_its_row_is_an_error() -> None:
    async def main() -> None:
        a, b = channels(2)
        a.send_nowait(1)
        b.send_nowait(1)
        rows = join(a, b, key=number)
        assert await anext(rows) == (1, 1)
        b.send_nowait(1)
        with pytest.raises(ProtocolError, match="input 2 of a join has a second item for 1"):
            await anext(rows)

    run_virtual(main)


def test_items_for_keys_that_the_primary_never_names_are_passed_over() -> None:
    async def main() -> None:
        a, b = channels(2)
        a.close()
        b.send_nowait(4)
        assert [row async for row in join(a, b, key=number)] == []

    run_virtual(main)


def test_a_cancelled_join_loses_nothing_and_watches_nothing() -> None:
    async def main() -> None:
        a, b = channels(2)
        a.send_nowait(1)
        rows = join(a, b, key=number)
        with anyio.move_on_after(1):
            await anext(rows)
        assert a.statistics().waiting_receivers == b.statistics().waiting_receivers == 0
        b.send_nowait(1)
        assert await anext(rows) == (1, 1)

    run_virtual(main)


def test_a_view_passes_only_items_of_its_classes() -> None:
    async def main() -> None:
        channel = Channel[object]("a->b", 8)
        for item in ("x", 1, 2.0, "y", 3):
            channel.send_nowait(item)
        assert where(channel, int, float).drain_nowait() == [1, 2.0, 3]
        channel.send_nowait("z")
        channel.send_nowait(4)
        channel.close()
        view = where(channel, int)
        assert [item async for item in view] == [4]
        assert view.ended
        assert await view.drain() == []
        assert view.statistics() == channel.statistics()

    run_virtual(main)


def test_a_view_that_is_drained_waits_for_an_item_of_its_classes() -> None:
    async def main() -> None:
        channel = Channel[object]("a->b", 8)
        channel.send_nowait("x")

        async def send_later() -> None:
            await anyio.sleep(1)
            await channel.send("y")
            await anyio.sleep(1)
            await channel.send(5)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(send_later)
            assert await where(channel, int).drain() == [5]
        assert anyio.current_time() == 2.0

    run_virtual(main)


def test_views_can_be_joined() -> None:
    async def main() -> None:
        a, b = Channel[object]("a->join", 4), Channel[float]("b->join", 4)
        for item in ("x", 1, "y"):
            a.send_nowait(item)
        a.close()
        b.send_nowait(1)
        assert [row async for row in join(where(a, int), b, key=number)] == [(1, 1)]

    run_virtual(main)
