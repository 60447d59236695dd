"""What holds in every place, with one body for all kinds; for Ray's in :mod:`tests.placement.ray.test_contract`."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import anyio
import anyio.lowlevel
import pytest

from oppo.errors import ModelError, ModelLost, ProtocolError, SessionsLost
from oppo.graph import Step
from oppo.observe import Span, now
from oppo.placement import Callback, Inline, Place, Process, Ranks, Thread
from tests.placement.instances import Caller, Total, Unmakeable, fail_to_set_up, gone


@dataclass(frozen=True)
class Kind:
    """A kind of place.

    Attributes:
        make: opens one of this name.
        what: it is in errors.
        died: how one named scorers is lost whose child has been killed; empty where no child is.
    """

    make: Callable[..., Any]
    what: str
    died: str = ""

    @property
    def apart(self) -> bool:
        return bool(self.died)


KINDS = {
    "inline": Kind(Inline, "place"),
    "thread": Kind(Thread, "thread of"),
    "process": Kind(Process, "process of", r"the process of 'scorers' \(pid \d+\) was killed by SIGKILL"),
    "ranks": Kind(
        lambda name, **options: Ranks(name, 2, **options),
        "group of ranks of",
        r"rank \d of 'scorers' \(pid \d+\) was killed by SIGKILL",
    ),
}


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture(scope="module")
def place(kind: Kind) -> Iterator[Place]:
    with kind.make("shared") as place:
        yield place


@pytest.fixture(params=["process", "ranks"])
def apart(request: pytest.FixtureRequest) -> Kind:
    return KINDS[request.param]


@pytest.fixture
def replaced() -> Kind:
    return KINDS["process"]


@pytest.fixture(scope="module", params=["inline", "thread", "process"])
def calling(request: pytest.FixtureRequest) -> Iterator[Place]:
    with KINDS[request.param].make("caller") as place:
        yield place


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with Process("caller") as process:
        yield process


@pytest.fixture
def pipes(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("begun", "go-on"):
        os.mkfifo(tmp_path / name)
    return tmp_path / "begun", tmp_path / "go-on"


async def until_gone(pids: Sequence[int]) -> None:
    with anyio.fail_after(120):
        while not gone(pids):  # noqa: ASYNC110 - nothing announces it
            await anyio.sleep(0.01)


async def test_calls_are_made_in_order_where_the_instances_live_and_are_reported(kind: Kind, place: Place) -> None:
    spans, answers, heard = list[Span](), list[int](), list[str]()
    place.listener = spans.append
    one, two = place.host(partial(Total, 1), track="critic"), place.host(partial(Total, 10))
    begun = now()

    async def add(number: int) -> None:
        answers.append(await one.call("extend", Total.add, number, times=2))

    async with anyio.create_task_group() as tasks:
        for number in (1, 10, 100):
            tasks.start_soon(add, number)
    await two.load(Total.add, 5, lambda: heard.append(place.at_work))
    assert answers == [3, 23, 223]
    assert await two.call("add", Total.add, 1) == 16
    assert heard == ["shared: load"], "before any other call"
    with pytest.raises(ZeroDivisionError):
        await two.call("fail", Total.fail)
    pids = {await one.call("look", Total.pid), await two.call("look", Total.pid)}
    assert pids == {place.pids[0] if isinstance(place, Process) else os.getpid()}
    assert (os.getpid() in pids) != kind.apart
    assert place.at_work == ""
    labels = ["load", "add", "fail", "look"]
    assert [(span.track, span.label) for span in spans] == [
        *[("critic", "extend")] * 3,
        *(("shared", label) for label in labels[:3]),
        ("critic", "look"),
        ("shared", "look"),
    ]
    times = [at for span in spans for at in (span.start, span.end)]
    assert times == sorted(times)
    assert begun <= times[0] <= times[-1] <= now()


async def test_a_span_says_for_which_step_the_call_was_made_and_in_which_role(place: Place) -> None:
    spans: list[Span] = []
    place.listener = spans.append
    total = place.host(partial(Total, 1))

    async def work(step: Step) -> None:
        with step.working("score"):
            await anyio.lowlevel.checkpoint()
            await total.call("add", Total.add, 1)
            await total.load(Total.add, 1)

    async with anyio.create_task_group() as tasks:
        for number in (3, 4):
            tasks.start_soon(work, Step(number, 1, 0.0))
    await total.call("add", Total.add, 1)
    found = [(span.step, span.role) for span in spans]
    assert sorted(found[:-1]) == [(3, "score")] * 2 + [(4, "score")] * 2
    assert found[-1] == (None, None), "of no step"


async def test_errors_come_back_as_themselves_and_the_place_goes_on(kind: Kind, place: Place) -> None:
    total = place.host(Total)
    with pytest.raises(ZeroDivisionError, match="no result") as raised:
        await total.call("fail", Total.fail)
    notes = getattr(raised.value, "__notes__", [])
    assert len(notes) == kind.apart
    assert all(note.startswith("in the process of 'shared':\nTraceback") and "in _divide" in note for note in notes)
    with pytest.raises(ProtocolError, match=r"^not like this$") as refused:
        await total.call("refuse", Total.refuse)
    assert not hasattr(refused.value, "__notes__"), "what is raised on purpose says all there is to say"
    assert await total.call("add", Total.add, 1) == 1


async def test_what_makes_no_instance_is_refused(place: Place) -> None:
    with pytest.raises(ModelError, match=r"expected a function .* got an object of Total"):
        place.host(Total())  # type: ignore[arg-type]  # what is refused


async def test_what_cannot_cross_is_refused(apart: Kind) -> None:
    with apart.make("shared") as place:
        total = place.host(Total)
        with pytest.raises(ModelError, match=r"OddError: 1 and 2\nTraceback"):
            await total.call("fail", Total.fail_oddly)
        with pytest.raises(ModelError, match="cannot go to another process"):
            await total.call("answer", Total.answer_oddly)
        with pytest.raises(ModelError, match=r"cannot go to another process: .*importable by name"):
            place.host(lambda: None)
        with pytest.raises(ModelError, match=r"cannot go to another process: .*importable by name"):
            await total.call("add", lambda total: total.sum)
        with pytest.raises(ZeroDivisionError, match="no result"):
            await place.host(Unmakeable).call("exist", repr)
        with pytest.raises(ModelError, match="'shared' shares no memory"):
            _ = total.here
        assert await total.call("add", Total.add, 1) == 1


async def test_a_setup_that_fails_is_the_error_of_the_first_call(apart: Kind) -> None:
    with pytest.raises(ModelError, match="cannot go to another process"):
        apart.make("never", setup=lambda: None)
    with apart.make("reward", setup=fail_to_set_up) as place:
        place.host(Total)
        with pytest.raises(OSError, match="no such core"):
            place.wait_until_ready()


async def test_a_closed_place_says_what_it_cannot_do_and_leaves_no_process(kind: Kind) -> None:
    place, pids = kind.make("reward"), list[int]()
    total = place.host(Total)
    if kind.apart:
        place.wait_until_ready()
        pids += place.pids
    place.close()
    place.close()
    with pytest.raises(ModelLost, match=f"the {kind.what} 'reward' is closed, so it cannot do 'extend'"):
        await total.call("extend", Total.add, 1)
    await until_gone(pids)


async def test_a_call_that_has_begun_is_waited_for_when_its_task_is_cancelled(
    process: Process, pipes: tuple[Path, Path]
) -> None:
    begun, go_on = pipes
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


async def test_a_child_that_is_killed_in_a_call_is_lost_at_once_and_for_good(apart: Kind) -> None:
    with apart.make("scorers") as place, anyio.fail_after(300):
        total = place.host(Total, track="critic")
        place.wait_until_ready()
        pids = place.pids
        with pytest.raises(ModelLost, match=rf"{apart.died}.* while it did 'extend' for 'critic'"):
            await total.call("extend", Total.end_by, signal.SIGKILL)
        with pytest.raises(ModelLost, match=rf"{apart.died}.* while it did 'finish' for 'critic'"):
            await total.call("finish", Total.add, 1)
        place.abort()
        with pytest.raises(ModelLost, match=rf"{apart.died}.* while it did 'finish'"):  # before it was killed here
            await total.call("finish", Total.add, 1)
        await until_gone(pids)


async def test_aborting_ends_a_call_in_progress(apart: Kind) -> None:
    with apart.make("scorers") as place, anyio.fail_after(300):
        total = place.host(Total)
        place.wait_until_ready()
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                with pytest.raises(ModelLost, match="killed by this process while it did 'sleep' for 'scorers'"):
                    await total.call("sleep", sleep, 600.0)

            tasks.start_soon(wait)
            while place.at_work != "scorers: sleep":  # noqa: ASYNC110 - nothing announces it
                await anyio.sleep(0.01)
            place.abort()
        with pytest.raises(ModelLost, match="killed by this process"):
            await total.call("add", Total.add, 1)
        await until_gone(place.pids)


def sleep(total: Total, seconds: float) -> None:
    del total
    time.sleep(seconds)


async def test_a_child_that_dies_is_replaced_and_says_once_of_each_instance_that_it_was_lost(
    replaced: Kind, tmp_path: Path, messages: list[str]
) -> None:
    with replaced.make("scorers", restarts=2) as place, anyio.fail_after(300):
        one, two, unused = (place.host(partial(Total, start), track=str(start)) for start in (0, 100, 5))
        await two.load(Total.add, 1000)
        assert await one.call("add", Total.add, 1) == 1
        assert await two.call("add", Total.add, 2) == 1102
        first = place.pid
        with pytest.raises(SessionsLost, match="'0' was lost with the process of 'scorers'"):
            await one.call("add", Total.add_or_die, 10, tmp_path / "mark")
        assert place.pid != first
        assert await one.call("add", Total.add, 10) == 10, "half of a call leaves no trace"
        assert await unused.call("add", Total.add, 1) == 6
        with pytest.raises(SessionsLost, match="'100' was lost"):
            await two.call("add", Total.add, 2)
        assert await two.call("add", Total.add, 2) == 1102, "what was loaded, then this"
        os.kill(place.pid, signal.SIGKILL)
        with pytest.raises(SessionsLost):
            await two.call("add", Total.add, 1)
        assert await two.call("add", Total.add, 1) == 1101
        os.kill(place.pid, signal.SIGKILL)
        with pytest.raises(ModelLost, match="no more than restarts=2 dead processes are replaced"):
            await one.call("add", Total.add, 1)
    assert f"(pid {first}" in messages[0]
    started = [message.rpartition("started again ")[2] for message in messages if "started again" in message]
    assert started == ["(1 of 2)", "(2 of 2)"]


# Callbacks: functions that are given to a call and stay with the caller.


def broken(number: int) -> NoReturn:
    raise LookupError(f"no place for {number}")


async def test_a_call_is_given_answers_and_what_it_tells_is_heard_in_order(calling: Place) -> None:
    heard: list[tuple[str, int]] = []

    def double(number: int) -> int:
        heard.append(("ask", number))
        return 2 * number

    def note(number: int) -> None:
        heard.append(("tell", number))

    caller = calling.host(Caller)
    came = await caller.call("collect", Caller.collect, Callback(double), tell=Callback(note, oneway=True), count=3)
    assert came == [0, 2, 4]
    assert heard == [(kind, number) for number in range(3) for kind in ("tell", "ask")]


@pytest.mark.parametrize(
    ("work", "args"),
    [
        (Caller.keep_telling, (Callback(broken),)),
        (Caller.keep_telling, (Callback(broken, oneway=True),)),
        *[(Caller.tell, (Callback(broken, oneway=True), 1))] * 5,  # what is told too late is of no other call
    ],
)
async def test_an_error_of_a_callback_ends_the_call_as_itself_and_the_place_goes_on(
    calling: Place, work: Callable[..., object], args: tuple[object, ...]
) -> None:
    caller, total = calling.host(Caller), calling.host(Total)
    with pytest.raises(LookupError, match="no place for ") as caught:
        await caller.call("ask", work, *args)
    assert not hasattr(caught.value, "__notes__")
    assert await total.call("add", Total.add, 0) == 0


async def test_after_the_first_error_no_callback_is_carried_out(calling: Place) -> None:
    asked: list[int] = []

    def once(number: int) -> NoReturn:
        asked.append(number)
        raise LookupError(f"no place for {number}")

    with pytest.raises(LookupError):
        await calling.host(Caller).call("collect", Caller.collect, Callback(once), Callback(asked.append), 3)
    assert asked == [0, 0]


async def test_a_callback_is_carried_out_here_while_the_event_loop_goes_on(process: Process) -> None:
    may_answer, pids = threading.Event(), list[int]()

    def answer(number: int) -> int:
        assert may_answer.wait(30)
        pids.append(os.getpid())
        return number

    async def let() -> None:
        may_answer.set()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(let)
        assert await process.host(Caller).call("ask", Caller.ask_again, Callback(answer)) == 2
    assert pids == [os.getpid()] * 2


async def test_work_that_goes_on_after_a_refusal_is_refused_again_and_a_reply_that_cannot_cross_is_one(
    process: Process,
) -> None:
    caller = process.host(Caller)
    with pytest.raises(LookupError, match="no place for 1"):
        await caller.call("ask", Caller.ask_again, Callback(broken))
    with pytest.raises(ModelError, match="cannot go to another process"):
        await caller.call("ask", Caller.ask_again, Callback(lambda number: lambda: number))  # type: ignore[arg-type]
    assert await caller.call("ask", Caller.ask_again, Callback(abs)) == 2


async def test_a_child_that_dies_between_a_question_and_its_answer_is_lost(replaced: Kind) -> None:
    asked: list[int] = []

    def answer(number: int) -> int:
        asked.append(number)
        return number

    with replaced.make("scorers", restarts=0) as place, anyio.fail_after(300):
        with pytest.raises(ModelLost, match=rf"{replaced.died}.*while it did 'ask'"):
            await place.host(Caller).call("ask", Caller.ask_and_die, Callback(answer))
        assert asked == [1]


async def test_a_call_that_calls_back_is_refused_where_it_would_be_repeated(replaced: Kind) -> None:
    with replaced.make("caller", restarts=1) as place:
        with pytest.raises(ProtocolError, match=r"'ask' for 'caller' calls back.*restarts=1: expected restarts=0"):
            await place.host(Caller).call("ask", Caller.ask_again, Callback(abs))
        assert await place.host(Total).call("add", Total.add, 1) == 1
