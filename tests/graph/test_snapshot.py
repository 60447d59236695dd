"""A step says at any moment who works and who waits for whom."""

from __future__ import annotations

from collections.abc import AsyncIterator

import anyio

from oppo.graph import GraphBuilder, Receiver, Sender, Snapshot, Wait
from oppo.simulate.engine import run_virtual


class Slow:
    """Takes a second over each item."""

    async def run(self, numbers: Receiver[int], /, *, out: Sender[int]) -> None:
        async for number in numbers:
            await anyio.sleep(1)
            await out.send(number)


class Double:
    """Sends everything twice, at once."""

    async def run(self, numbers: Receiver[int], /, *, out: Sender[int]) -> None:
        async for number in numbers:
            await out.send(number)
            await out.send(number)


class Last:
    """Sends the last number when there are no more."""

    async def run(self, numbers: Receiver[int], /, *, out: Sender[int]) -> None:
        every = [number async for number in numbers]
        await out.send(every[-1])


async def snapshots(*times: float) -> list[Snapshot]:
    """Return what a step of three stages was doing at these times."""

    async def numbers() -> AsyncIterator[int]:
        for number in range(3):
            yield number
        await anyio.sleep(100)

    g: GraphBuilder[int] = GraphBuilder("three", capacity=1)
    doubled = g.add("double", Double(), g.prompts)
    graph = g.build(g.add("last", Last(), g.add("slow", Slow(), doubled)))
    seen: list[Snapshot] = []
    async with graph.open(numbers()) as run:
        assert not run.snapshots()

        async def look() -> None:
            for at in times:
                await anyio.sleep(at - anyio.current_time())
                seen.extend(run.snapshots())

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(look)
            await run.step()
        assert not run.snapshots()
    return seen


def test_a_snapshot_tells_waiting_for_an_item_from_waiting_for_room() -> None:
    early, late = run_virtual(snapshots, 0.5, 50.0)
    assert early.waits == (Wait("double", "slow", "room"), Wait("last", "slow", "an item"))
    assert early.working == ["slow"]
    assert early.message() == "double waits for slow to make room; last waits for slow; slow is at work"
    assert early.channels["double->slow"]["waiting_senders"] == 1
    assert late.message() == "double waits for prompts; slow waits for double; last waits for slow"
    assert late.doing("double") == "waits for prompts"
    assert "double->slow" in late.table


def test_a_stage_that_has_returned_does_nothing() -> None:
    assert Snapshot(0, ("reward",), (), {}, "").doing("generate") == ""
    assert Snapshot(0, ("reward",), (), {}, "").doing("reward") == "at work"
