"""A detached call ends with its work, or without it where its caller is cancelled; it keeps no process from ending."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import anyio
import anyio.to_thread
import pytest

from oppo.placement import detached
from oppo.placement.detached import DisposableProcess, run_detached
from oppo.placement.process import ChildProcess, Gone
from oppo.placement.wire import Answer, Call, Callbacks, Failure, Packet, pack

NAMED: ContextVar[str] = ContextVar("NAMED", default="nobody")


async def test_it_returns_what_its_work_returns_and_works_in_a_thread_that_keeps_no_process() -> None:
    thread = await run_detached("mine", threading.current_thread)
    assert thread is not threading.current_thread()
    assert (thread.name, thread.daemon) == ("mine", True)


async def test_its_work_has_the_callers_context_and_cannot_change_it() -> None:
    NAMED.set("somebody")

    def rename() -> str:
        before = NAMED.get()
        NAMED.set("somebody else")
        return before

    assert await run_detached("mine", rename) == "somebody"
    assert NAMED.get() == "somebody"


async def test_its_work_may_run_an_event_loop() -> None:
    async def inner() -> str:
        return "done"

    assert await run_detached("mine", lambda: anyio.run(inner)) == "done"


async def test_what_its_work_raises_is_raised_here() -> None:
    with pytest.raises(ZeroDivisionError):
        await run_detached("mine", lambda: 1 / 0)
    nothing: Iterator[int] = iter(())
    with pytest.raises(RuntimeError, match="StopIteration") as caught:
        await run_detached("mine", lambda: next(nothing))
    assert isinstance(caught.value.__cause__, StopIteration)


async def test_a_caller_that_is_cancelled_leaves_its_work_behind() -> None:
    entered, release = threading.Event(), threading.Event()

    def work() -> None:
        entered.set()
        release.wait(60)

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run_detached, "mine", work)
            await anyio.to_thread.run_sync(entered.wait, 60)
            tasks.cancel_scope.cancel()
        assert not release.is_set()
    finally:
        release.set()


STUCK = """
import threading
import anyio
from oppo import FunctionReward, Overcommit, ppo
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer
from oppo.testing import fake_per_token, prompts

entered = threading.Event()

def reward(prompts, completions):
    entered.set()
    threading.Event().wait()

class Critic(FakeCritic):
    async def finish(self, finished):
        while not entered.is_set():
            await anyio.sleep(0.01)
        raise LookupError("the critic is gone")

async def main():
    graph = ppo(
        policy=FakePolicy(lambda prompt: 3),
        reference=FakeScorer(fake_per_token),
        reward=FunctionReward(reward, str),
        critic=Critic(),
        trainer=FakeTrainer(),
        admission=Overcommit(batch=2),
    )
    async with graph.open(prompts(9)) as run:
        async for _ in run.steps(2):
            pass

anyio.run(main)
"""


def test_a_reward_function_that_never_returns_does_not_keep_the_process_of_a_run_that_failed() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], timeout=60, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert "LookupError: the critic is gone" in done.stderr


def add(one: int, other: int) -> int:
    return one + other


async def test_a_call_whose_death_is_noticed_late_leaves_its_successor_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cancelled, killed; the next call starts another child; only then the first one's thread finds its own dead."""
    noticed, first = threading.Event(), list[ChildProcess]()

    class SlowToNotice(ChildProcess):
        def ask(self, packet: Packet, callbacks: Callbacks | None = None) -> Answer | Failure:
            first.append(self)
            if self is first[0]:
                noticed.wait()
                raise Gone("was killed")
            return super().ask(packet, callbacks)

    monkeypatch.setattr(detached, "ChildProcess", SlowToNotice)
    process = DisposableProcess("adding", 1)
    with anyio.move_on_after(0.05):
        await process.call(add, 1)
    assert await process.call(add, 1) == 2
    noticed.set()
    await anyio.sleep(0.05)
    assert await process.call(add, 2) == 3
    assert len({id(child) for child in first}) == 2
    process.close()


async def test_a_call_that_is_cancelled_while_its_child_starts_leaves_no_child(monkeypatch: pytest.MonkeyPatch) -> None:
    starting, started = threading.Event(), list[ChildProcess]()

    class SlowToStart(ChildProcess):
        def __init__(self, name: str, setup: Callable[[], object] | None) -> None:
            starting.wait(0.2)
            super().__init__(name, setup)
            started.append(self)

    monkeypatch.setattr(detached, "ChildProcess", SlowToStart)
    process = DisposableProcess("adding", 1)
    with anyio.move_on_after(0.05):
        await process.call(add, 1)
    (child,) = started
    with pytest.raises(Gone):
        child.ask(pack(Call(None, add, (1, 1))))
