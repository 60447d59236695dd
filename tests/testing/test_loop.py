from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable

import anyio
import pytest
from hypothesis import given, strategies as st

from oppo.errors import DeadlockError, ProtocolError
from oppo.simulate.engine import VirtualTimeLoop, run_virtual


async def slept(seconds: float) -> float:
    await anyio.sleep(seconds)
    return anyio.current_time()


def test_the_clock_starts_at_zero_and_jumps() -> None:
    assert run_virtual(slept, 0) == 0.0
    assert run_virtual(slept, 86_400 * 30.5) == 86_400 * 30.5


@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=20))
def test_time_adds_up_as_floats_do(pauses: list[float]) -> None:
    async def main() -> list[float]:
        return [await slept(pause) for pause in pauses]

    assert run_virtual(main) == list(itertools.accumulate(pauses))


def test_tasks_wake_in_the_order_of_their_timers() -> None:
    async def main() -> list[tuple[float, int]]:
        woken: list[tuple[float, int]] = []

        async def wait(number: int, seconds: float) -> None:
            await anyio.sleep(seconds)
            woken.append((anyio.current_time(), number))

        async with anyio.create_task_group() as tasks:
            for number, seconds in enumerate((0.3, 0.1, 0.2, 0.1)):
                tasks.start_soon(wait, number, seconds)
        return woken

    assert run_virtual(main) == [(0.1, 1), (0.1, 3), (0.2, 2), (0.3, 0)]


def test_cancelled_timers_leave_no_trace_in_the_clock() -> None:
    async def main() -> float:
        with anyio.fail_after(5.0):
            await anyio.sleep(0.1)
        with anyio.fail_after(7.0):
            await anyio.sleep(0.1)
        await anyio.sleep(20.0)
        return anyio.current_time()

    assert run_virtual(main) == 0.1 + 0.1 + 20.0


def test_a_deadline_passes_at_its_time() -> None:
    async def main() -> float:
        with anyio.move_on_after(2.5):
            await anyio.sleep_forever()
        return anyio.current_time()

    assert run_virtual(main) == 2.5


def test_an_absolute_deadline_is_met_exactly_where_the_distance_rounds() -> None:
    async def main() -> float:
        await anyio.sleep(0.7)
        with anyio.CancelScope(deadline=3.82):  # 0.7 + (3.82 - 0.7) is not 3.82
            await anyio.sleep_forever()
        return anyio.current_time()

    assert run_virtual(main) == 3.82


def test_a_shielded_sleep_in_a_cancelled_scope_takes_its_time() -> None:
    async def shielded() -> None:
        with anyio.CancelScope(shield=True):
            await anyio.sleep(3)

    async def main() -> float:
        with anyio.move_on_after(1):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(shielded)
        return anyio.current_time()

    assert run_virtual(main) == 3.0


def test_a_wait_that_cannot_end_is_a_deadlock() -> None:
    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.Event().wait, name="the one that waits")
            await anyio.sleep_forever()

    for _ in range(2):
        with pytest.raises(DeadlockError, match=r"every task waits and nothing can wake one: .*the one that waits"):
            run_virtual(main)
    assert run_virtual(slept, 1.0) == 1.0, "later loops are not harmed"


def test_a_deadlock_shows_what_was_registered_and_not_withdrawn() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        withdraw = loop.on_deadlock(lambda: "no longer true")
        loop.on_deadlock(lambda: "a->b 1/1")
        withdraw()
        await anyio.sleep_forever()

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    assert str(caught.value).splitlines()[1:] == ["a->b 1/1"]


def test_a_loop_goes_on_after_a_deadlock() -> None:
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        with pytest.raises(DeadlockError):
            runner.run(anyio.sleep_forever())
        assert runner.run(slept(1.0)) == 1.0


def test_what_a_task_cleans_up_after_a_deadlock_takes_virtual_time() -> None:
    ends: list[float] = []

    async def main() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            with anyio.CancelScope(shield=True):
                ends.append(await slept(2.0))

    with pytest.raises(DeadlockError):
        run_virtual(main)
    assert ends == [2.0]


def test_an_error_passes_through() -> None:
    async def main() -> None:
        await anyio.sleep(1)
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        run_virtual(main)


def test_time_that_runs_away_is_an_error() -> None:
    with pytest.raises(OverflowError, match="virtual time has run past"):
        run_virtual(slept, 1e9)


@pytest.mark.parametrize("run", [asyncio.to_thread, anyio.to_thread.run_sync])
def test_threads_are_refused(run: Callable[[Callable[[], int]], Awaitable[int]]) -> None:
    async def main() -> None:
        await run(threading.get_ident)

    with pytest.raises(ProtocolError, match="virtual time knows no threads"):
        run_virtual(main)


def test_a_slow_worker_thread_is_refused_before_time_passes() -> None:
    done = threading.Event()

    async def main() -> None:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.to_thread.run_sync, done.wait, 5)
            try:
                await anyio.sleep(100)
            finally:
                done.set()

    with pytest.raises(ProtocolError, match="'AnyIO worker thread' is one"):
        run_virtual(main)
    assert done.is_set()


def test_a_foreign_thread_that_calls_in_is_refused() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        thread = threading.Thread(target=loop.call_soon_threadsafe, args=(int,), name="intruder")
        thread.start()
        thread.join()
        await anyio.sleep(1)

    with pytest.raises(ProtocolError, match="virtual time knows no threads, but 'intruder' is one"):
        run_virtual(main)


def test_debug_mode_works() -> None:
    async def main() -> float:
        return await slept(1.0)

    with asyncio.Runner(debug=True, loop_factory=VirtualTimeLoop) as runner:
        assert runner.run(main()) == 1.0
