"""Calls in other processes and detached threads: what crosses, what comes back, and what ends with whom."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from contextvars import ContextVar
from functools import partial
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from oppo.errors import ModelLost, SessionsLost
from oppo.placement import Callback, Process, process as process_module
from oppo.placement.child import Call, Callbacks, Outcome, Packet, pack
from oppo.placement.place import run_detached
from oppo.placement.process import ChildProcess, DisposableProcess, Gone
from oppo.placement.shared_memory import Block
from tests.placement.instances import Caller, Lent, Slate, Total

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with Process("shared") as process:
        yield process


async def test_a_block_is_the_same_memory_on_both_sides_and_weights_are_written_here(process: Process) -> None:
    block = Block.new(8)
    slate, third = process.host(partial(Slate, block)), process.host(partial(Slate, block))
    assert slate.here.block is block
    await slate.load(Slate.write, b"weights")
    assert await third.call("read", Slate.read) == b"weights"
    await third.call("write", Slate.write, b"theirs ")
    assert slate.here.read() == b"theirs "


async def test_a_call_with_callbacks_may_be_given_shared_memory(process: Process) -> None:
    block = Block.new(1)

    def write(text: str) -> None:
        assert text == "begun"
        block[0] = 1

    assert await process.host(Caller).call("watch", Caller.watch, block, Callback(write, oneway=True)) == "seen"


async def test_ctrl_c_is_the_parents_business(process: Process) -> None:
    total = process.host(Total)
    assert await total.call("add", Total.add, 1) == 1
    os.kill(process.pid, signal.SIGINT)
    assert await total.call("add", Total.add, 1) == 2


@pytest.mark.parametrize(
    ("work", "argument", "death"),
    [(Total.end_by, signal.SIGTERM, "was killed by SIGTERM"), (Total.leave, 3, "ended with exit code 3")],
)
async def test_a_death_says_how_it_came(work: Callable[[Total, int], object], argument: int, death: str) -> None:
    with Process("scorers") as process, pytest.raises(ModelLost, match=f"{death} while it did 'extend'"):
        await process.host(Total).call("extend", work, argument)


async def test_weights_that_can_be_read_once_are_packed_anew_for_a_child_that_replaces_one() -> None:
    with Process("scorers", restarts=1) as process:
        total, lent = process.host(Total), Lent(7)
        await total.load(Total.take, lent)
        assert await total.call("add", Total.add, 1) == 8
        assert lent.pickles == 1
        os.kill(process.pid, signal.SIGKILL)
        lent.number = 9
        with pytest.raises(SessionsLost):
            await total.call("add", Total.add, 1)
        assert await total.call("add", Total.add, 1) == 10
        assert lent.pickles == 2


async def test_restarts_are_counted_by_the_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    at = [0.0]
    monkeypatch.setattr("oppo.observe.now", lambda: at[0])
    with Process("scorers", restarts=1) as process:
        total = process.host(Total)
        for hour in range(3):
            at[0] = 3600.0 * hour
            os.kill(process.pid, signal.SIGKILL)
            with suppress(SessionsLost):  # not at first
                await total.call("add", Total.add, 1)
            assert await total.call("add", Total.add, 1) in {1, 2}
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ModelLost, match=r"no more than restarts=1 dead processes are replaced in 1 h"):
            await total.call("add", Total.add, 1)


async def test_a_child_that_hangs_can_be_ended_and_is_not_replaced() -> None:
    with Process("scorers", restarts=3) as process:
        total, lost = process.host(Total), list[str]()
        assert await total.call("add", Total.add, 1) == 1
        os.kill(process.pid, signal.SIGSTOP)

        async def ask() -> None:
            with pytest.raises(ModelLost, match="was killed by this process while it did 'extend'") as caught:
                await total.call("extend", Total.add, 1)
            lost.append(str(caught.value))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(ask)
            await anyio.lowlevel.checkpoint()
            process.abort()
        with pytest.raises(ModelLost, match="was killed by this process"):
            await total.call("extend", Total.add, 1)
    assert len(lost) == 1


PROGRAM = """
import anyio
from oppo.placement import Process
from tests.placement.instances import Total

class Mine:
    def look(self):
        return 1

async def main():
    with Process("total") as process:
        print("pid", process.pid, flush=True)
        print(await process.host(Total).call("add", Total.add, 41), flush=True)
        try:
            process.host(Mine)
        except Exception as error:
            print(error)

anyio.run(main)
"""
SAID = (
    "41\nMine is defined in the program itself, which another process does not run again: put it into a module that "
    "can be imported, or choose a Thread instead of a Process\n"
)


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize("how", ["script", "command", "input"])
def test_the_program_of_the_parent_is_not_run_again(how: str, tmp_path: Path) -> None:
    """Neither a script without a guard nor what was typed in."""
    (tmp_path / "script.py").write_text(PROGRAM)
    command = {"script": [str(tmp_path / "script.py")], "command": ["-c", PROGRAM], "input": ["-"]}[how]
    ran = subprocess.run(
        [sys.executable, *command], input=PROGRAM, capture_output=True, text=True, check=True, env=environment()
    )
    assert ran.stdout.partition("\n")[2] == SAID
    assert ran.stderr == ""


ORPHANED = """
import time
import anyio
from oppo.placement import Callback, Process
from oppo.placement.place import run_detached
from tests.placement.instances import Caller, Total

def never(number):
    print("begun", flush=True)
    time.sleep(600)

async def main():
    place = await run_detached("starter", lambda: Process("orphan"))  # by a thread that has ended since
    await {work}

anyio.run(main)
"""


@pytest.mark.parametrize(
    "work",
    [
        "place.host(Total).call('work', Total.hang)",
        "place.host(Total).call('work', Total.hold_the_lock)",
        "place.host(Caller).call('ask', Caller.ask_again, Callback(never))",
    ],
    ids=["works", "holds the interpreter lock", "waits for an answer"],
)
def test_a_child_dies_with_its_parent(work: str) -> None:
    command = [sys.executable, "-c", ORPHANED.format(work=work)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "begun\n"
        parent.kill()
        assert parent.stdout.read() == "", "the output ends when nobody holds it any more, the child neither"


def test_what_a_child_prints_and_logs_is_shown_without_control_characters_and_secrets() -> None:
    words = "\x1b[31mred\x07 \u00e9 hunter2-hunter2-hunter2\tend"
    program = (
        "import anyio\nfrom oppo.placement.process import DisposableProcess\n"
        "from tests.placement.instances import Total\n"
        f"anyio.run(DisposableProcess('grader', Total()).call, Total.say, {words!r})\n"
    )
    variables = environment() | {"GRADER_PASSWORD": "hunter2-hunter2-hunter2", "PYTHONIOENCODING": "utf-8"}
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, encoding="utf-8", check=True, env=variables
    )
    shown = "\\x1b[31mred\\x07 \u00e9 ***\tend\n"
    assert (ran.stdout, ran.stderr) == (shown, shown * 2)


NAMED: ContextVar[str] = ContextVar("NAMED", default="nobody")


async def test_detached_work_is_done_in_the_callers_context_in_a_thread_that_keeps_no_process() -> None:
    NAMED.set("somebody")

    def work() -> tuple[str, str, bool]:
        before = NAMED.get()
        NAMED.set("somebody else")
        thread = threading.current_thread()
        return before, thread.name, thread.daemon

    async def inner() -> tuple[str, str, bool]:
        return work()

    assert await run_detached("mine", lambda: anyio.run(inner)) == ("somebody", "mine", True)
    assert NAMED.get() == "somebody"
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
from oppo import FunctionReward
from oppo.events import Finish, Response
from oppo.testing import prompts

entered = threading.Event()

def reward(prompts, completions):
    entered.set()
    threading.Event().wait()

async def main():
    (prompt,) = prompts(1)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(FunctionReward(reward, str).finish, [Finish(0, Response.empty(prompt), "eos")])
        while not entered.is_set():
            await anyio.sleep(0.01)
        raise LookupError("the critic is gone")

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
        def ask(self, packet: Packet, callbacks: Callbacks | None = None) -> Outcome:
            first.append(self)
            if self is first[0]:
                noticed.wait()
                raise Gone("was killed")
            return super().ask(packet, callbacks)

    monkeypatch.setattr(process_module, "ChildProcess", SlowToNotice)
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

    monkeypatch.setattr(process_module, "ChildProcess", SlowToStart)
    process = DisposableProcess("adding", 1)
    with anyio.move_on_after(0.05):
        await process.call(add, 1)
    (child,) = started
    with pytest.raises(Gone):
        child.ask(pack(Call(None, add, (1, 1))))
