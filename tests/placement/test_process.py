"""Calls in other processes and detached threads: what crosses, what comes back, and what ends with whom."""

from __future__ import annotations

import asyncio
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

from oppo.errors import ModelError, ModelLost, ProtocolError, SessionsLost
from oppo.observe import Span, now
from oppo.placement import Inline, Process, process as process_module
from oppo.placement.place import run_detached
from oppo.placement.process import ChildProcess, DisposableProcess, Gone
from oppo.placement.shared_memory import Block
from oppo.placement.wire import Call, Callbacks, Outcome, Packet, pack
from tests.placement.instances import Lent, Slate, Total, Unmakeable

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    """A process for tests that leave it alive."""
    with Process("shared") as process:
        yield process


async def test_instances_live_in_one_other_process_and_keep_their_state(process: Process) -> None:
    one, two = process.host(partial(Total, 1)), process.host(partial(Total, 10))
    assert [await one.call("add", Total.add, 1), await two.call("add", Total.add, 1)] == [2, 11]
    assert await one.call("add", Total.add, 2, times=4) == 10
    assert {await one.call("look", Total.pid), await two.call("look", Total.pid)} == {process.pid}
    assert process.pid != os.getpid()


async def test_calls_are_answered_in_order(process: Process) -> None:
    total, answers = process.host(Total), list[int]()

    async def add(number: int) -> None:
        answers.append(await total.call("add", Total.add, number))

    async with anyio.create_task_group() as tasks:
        for number in (1, 10, 100):
            tasks.start_soon(add, number)
    assert answers == [1, 11, 111]


async def test_spans_are_the_childs_own_time_on_the_track_of_the_instance(process: Process) -> None:
    spans: list[Span] = []
    process.listener = spans.append
    total = process.host(Total, track="critic")
    begun = now()
    await total.call("extend", Total.add, 1)
    await total.load(Total.add, 1)
    with pytest.raises(ZeroDivisionError):
        await process.host(Total).call("fail", Total.fail)
    assert [(span.track, span.label) for span in spans] == [
        ("critic", "extend"),
        ("critic", "load"),
        ("shared", "fail"),
    ]
    times = [at for span in spans for at in (span.start, span.end)]
    assert times == sorted(times)
    assert begun <= times[0] <= times[-1] <= now()


async def test_weights_are_written_here_where_memory_is_shared_and_sent_where_it_is_not(process: Process) -> None:
    block = Block.new(8)
    slate, total = process.host(partial(Slate, block)), process.host(Total)
    await slate.load(Slate.write, b"weights")
    assert slate.here.block is block
    assert await slate.call("read", Slate.read) == b"weights"
    await total.load(Total.add, 5)
    assert await total.call("add", Total.add, 1) == 6
    with pytest.raises(ModelError, match="'shared' shares no memory"):
        _ = total.here


async def test_what_makes_no_instance_is_refused(process: Process) -> None:
    for place in (process, Inline("here")):
        with pytest.raises(ModelError, match=r"expected a function .* got an object of Total"):
            place.host(Total())  # type: ignore[arg-type]  # what is refused


async def test_errors_come_back_as_themselves(process: Process) -> None:
    total = process.host(Total)
    with pytest.raises(ZeroDivisionError, match="no result") as raised:
        await total.call("fail", Total.fail)
    (note,) = raised.value.__notes__
    assert note.startswith("in the process of 'shared':\nTraceback")
    assert "in _divide" in note
    with pytest.raises(ProtocolError, match=r"^not like this$") as refused:
        await total.call("refuse", Total.refuse)
    assert not hasattr(refused.value, "__notes__"), "what is raised on purpose says all there is to say"
    with pytest.raises(ModelError, match=r"OddError: 1 and 2\nTraceback"):
        await total.call("fail", Total.fail_oddly)
    with pytest.raises(ModelError, match="cannot go to another process"):
        await total.call("answer", Total.answer_oddly)
    assert await total.call("add", Total.add, 1) == 1, "the child goes on"


async def test_what_cannot_cross_is_refused(process: Process) -> None:
    with pytest.raises(ModelError, match=r"cannot go to another process: .*importable by name"):
        process.host(lambda: None)
    with pytest.raises(ModelError, match=r"cannot go to another process: .*importable by name"):
        await process.host(Total).call("add", lambda total: total.sum)
    with pytest.raises(ModelError, match="cannot go to another process"):
        Process("never", setup=lambda: None)
    with pytest.raises(ZeroDivisionError, match="no result"):
        await process.host(Unmakeable).call("exist", repr)


async def test_a_block_is_the_same_memory_on_both_sides(process: Process) -> None:
    block = Block.new(1000)
    here, there, third = Slate(block), process.host(partial(Slate, block)), process.host(partial(Slate, block))
    await there.call("write", Slate.write, b"from there")
    assert here.read() == b"from there"
    here.write(b"and back  ")
    assert await third.call("read", Slate.read) == b"and back  "


async def test_ctrl_c_is_the_parents_business(process: Process) -> None:
    total = process.host(Total)
    assert await total.call("add", Total.add, 1) == 1
    os.kill(process.pid, signal.SIGINT)
    assert await total.call("add", Total.add, 1) == 2


async def test_a_call_that_has_begun_is_waited_for_when_its_task_is_cancelled(process: Process, tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    os.mkfifo(begun)
    os.mkfifo(go_on)
    total = process.host(Total)
    async with asyncio.TaskGroup() as tasks:
        caller = tasks.create_task(total.call("add", Total.add_when_told, 7, begun, go_on))
        assert await asyncio.to_thread(begun.read_text) == "begun"
        caller.cancel()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        still_waiting = not caller.done()
        await asyncio.to_thread(go_on.write_text, "go on")
    assert still_waiting, "the caller went on though its model was still at work"
    assert caller.cancelled()
    assert await total.call("add", Total.add, 0) == 7


@pytest.mark.parametrize("name", ["SIGKILL", "SIGTERM"])
async def test_a_child_killed_in_a_call_is_lost_at_once_and_for_good(name: str, tmp_path: Path) -> None:
    with Process("scorers") as process:
        total = process.host(Total, track="critic")
        lost = rf"the process of 'scorers' \(pid {process.pid}\) was killed by {name}.* while it did '%s' for 'critic'"
        with pytest.raises(ModelLost, match=lost % "extend"):
            await total.call("extend", Total.add_or_die, 4, tmp_path / "mark", signal.Signals[name])
        with pytest.raises(ModelLost, match=lost % "finish"):
            await total.call("finish", Total.add, 1)


async def test_a_child_that_leaves_is_lost_with_its_exit_code() -> None:
    with Process("scorers") as process:
        total = process.host(Total)
        with pytest.raises(ModelLost, match="ended with exit code 3 while it did 'extend'"):
            await total.call("extend", Total.leave, 3)


async def test_a_child_that_dies_is_replaced_and_says_once_of_each_instance_that_it_was_lost(
    tmp_path: Path, messages: list[str]
) -> None:
    with Process("scorers", restarts=2) as process:
        one, two, unused = (process.host(partial(Total, start), track=str(start)) for start in (0, 100, 5))
        assert await one.call("add", Total.add, 1) == 1
        assert await two.call("add", Total.add, 2) == 102
        first = process.pid
        with pytest.raises(SessionsLost, match="'0' was lost with the process of 'scorers'"):
            await one.call("add", Total.add_or_die, 10, tmp_path / "mark")
        assert process.pid != first
        assert await one.call("add", Total.add, 10) == 10, "half of a call leaves no trace"
        assert await unused.call("add", Total.add, 1) == 6
        with pytest.raises(SessionsLost, match="'100' was lost"):
            await two.call("add", Total.add, 2)
        assert await two.call("add", Total.add, 2) == 102
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(SessionsLost):
            await two.call("add", Total.add, 1)
        assert await two.call("add", Total.add, 1) == 101
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(ModelLost, match=r"SIGKILL.*; no more than restarts=2 dead processes are replaced"):
            await one.call("add", Total.add, 1)
    assert [message.rpartition("started again ")[2] for message in messages] == ["(1 of 2)", "(2 of 2)"]


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
        {more}

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
    program = PROGRAM.format(more="")
    (tmp_path / "script.py").write_text(program)
    command = {"script": [str(tmp_path / "script.py")], "command": ["-c", program], "input": ["-"]}[how]
    ran = subprocess.run(
        [sys.executable, *command], input=program, capture_output=True, text=True, check=True, env=environment()
    )
    assert ran.stdout.partition("\n")[2] == SAID
    assert ran.stderr == ""


def test_a_child_in_the_middle_of_its_work_dies_with_its_parent(tmp_path: Path) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go-on"
    os.mkfifo(begun)
    os.mkfifo(go_on)
    more = (
        "from pathlib import Path; total = process.host(Total)\n"
        f"        await total.call('add', Total.add_when_told, 1, Path({str(begun)!r}), Path({str(go_on)!r}))"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", PROGRAM.format(more=more)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    with parent:
        assert parent.stdout is not None
        assert begun.read_text() == "begun"
        parent.kill()
        assert parent.stdout.read().endswith(SAID), "the output ends when nobody holds it any more, the child neither"


def test_a_child_that_holds_the_interpreter_lock_dies_with_its_parent(tmp_path: Path) -> None:
    """Its process was started by a thread that has ended since, and no thread of Python can run in it."""
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    program = (
        "import anyio\nfrom pathlib import Path\nfrom oppo.placement.process import DisposableProcess\n"
        "from tests.placement.instances import Total\n"
        "async def main():\n"
        "    child = DisposableProcess('grader', Total())\n"
        "    print(await child.call(Total.add, 1), flush=True)\n"
        f"    await child.call(Total.hold_the_lock, Path({str(begun)!r}))\n"
        "anyio.run(main)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment())
    with parent:
        assert parent.stdout is not None
        assert begun.read_text() == "begun"
        parent.kill()
        assert parent.stdout.read() == "1\n", "the output ends once no process holds it"


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
