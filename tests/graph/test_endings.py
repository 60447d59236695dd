"""A step ends with its result or with an error; a cancellation from within is no end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import anyio
import pytest
import trio
import uvloop

from oppo.errors import OppoError, ProtocolError, as_itself
from oppo.graph import Receiver, Sender
from oppo.simulate.engine import run_virtual
from tests.graph.stages import Boom, Relay, line
from tests.graph.test_run import results_of


async def raise_it() -> None:
    """Raise what awaiting a task that one has cancelled oneself raises."""
    raise asyncio.CancelledError


async def cancel_own_task() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await anyio.sleep(1)


class Impatient(Relay):
    """A stage in which a cancellation arises that nobody outside has asked for."""

    def __init__(self, cancel: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._cancel = cancel

    async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
        async for _ in items:
            await self._cancel()


@pytest.mark.parametrize("cancel", [raise_it, cancel_own_task])
def test_a_stage_that_is_cancelled_from_within_ends_the_run_by_an_error(cancel: Callable[[], Awaitable[None]]) -> None:
    with pytest.raises(ProtocolError, match=r"nothing had cancelled this call|cancelled itself"):
        run_virtual(results_of, line().replace(relay=Impatient(cancel)), 3)


async def test_a_cancellation_from_outside_stays_one() -> None:
    async def go_on() -> None:
        async with line().replace(relay=Relay(1000.0)).open(range(9)) as run:
            await run.step()

    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(go_on())
        await anyio.sleep(0.01)
        task.cancel()
    assert task.cancelled()
    with anyio.move_on_after(0.01) as scope:
        await go_on()
    assert scope.cancelled_caught


def test_errors_of_a_kind_are_named_once_with_their_number() -> None:
    class Many(Relay):
        async def run(self, items: Receiver[int], *, out: Sender[int]) -> None:
            with as_itself():
                async with anyio.create_task_group() as tasks:
                    for number in range(30):
                        tasks.start_soon(self.fail, number)
                    tasks.start_soon(self.stumble)

        async def fail(self, number: int) -> None:
            raise Boom(f"rollout {number} is lost")

        async def stumble(self) -> None:
            raise KeyError("gold")

    with pytest.raises(Boom, match="rollout 0 is lost") as caught:
        run_virtual(results_of, line().replace(relay=Many()), 1)
    assert caught.value.__notes__ == [
        "and 29 more like it",
        "and then KeyError: 'gold'",
        "in stage 'relay' of graph 'line', step 1",
    ]


def test_under_trio_a_message_says_what_to_run_it_with() -> None:
    async def main() -> None:
        async with line().open(range(9)):
            raise AssertionError

    with pytest.raises(OppoError, match=r"oppo runs on asyncio, uvloop included.*anyio\.run\(main\)"):
        trio.run(main)


def test_uvloop_runs_the_same_steps() -> None:
    assert uvloop.run(results_of(line(), 2)) == [(0, 1, 2), (3, 4, 5)]
