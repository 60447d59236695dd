"""Functions that are given to a call and stay with the caller, in every kind of place."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import NoReturn

import anyio
import pytest

from oppo.errors import ModelError, ModelLost, ProtocolError
from oppo.placement import Callback, Inline, Place, Process, Thread
from oppo.placement.shared_memory import Block
from tests.placement.instances import Caller, Total
from tests.placement.test_process import environment


@pytest.fixture(scope="module", params=["inline", "thread", "process"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    kinds: dict[str, type[Inline | Thread | Process]] = {"inline": Inline, "thread": Thread, "process": Process}
    with kinds[request.param]("caller") as place:
        yield place


def broken(number: int) -> NoReturn:
    raise LookupError(f"no place for {number}")


async def test_a_call_is_given_answers_and_what_it_tells_is_heard_in_order(place: Place) -> None:
    heard: list[tuple[str, int]] = []

    def double(number: int) -> int:
        heard.append(("ask", number))
        return 2 * number

    def note(number: int) -> None:
        heard.append(("tell", number))

    caller = place.host(Caller)
    came = await caller.call("collect", Caller.collect, Callback(double), Callback(note, oneway=True), count=3)
    assert came == [0, 2, 4]
    assert heard == [(kind, number) for number in range(3) for kind in ("tell", "ask")]


async def test_callbacks_may_be_given_by_name(place: Place) -> None:
    caller = place.host(Caller)
    assert await caller.call("ask", Caller.ask_again, ask=Callback(abs)) == 2


async def test_an_error_of_a_callback_ends_the_call_as_itself_and_the_place_goes_on(place: Place) -> None:
    caller, total = place.host(Caller), place.host(Total)
    for ends in (Callback(broken), Callback(broken, oneway=True)):
        with pytest.raises(LookupError, match="no place for 1") as caught:
            await caller.call("ask", Caller.keep_telling, ends)
        assert not hasattr(caught.value, "__notes__")
        assert await total.call("add", Total.add, 0) == 0


async def test_an_error_of_the_last_thing_told_ends_the_call_too(place: Place) -> None:
    caller, total = place.host(Caller), place.host(Total)
    for _ in range(20):
        with pytest.raises(LookupError, match="no place for 0"):
            await caller.call("tell", Caller.tell, Callback(broken, oneway=True), 1)
        assert await total.call("add", Total.add, 0) == 0, "what the child is told too late is of no other call"


async def test_after_the_first_error_no_callback_is_carried_out(place: Place) -> None:
    asked: list[int] = []

    def once(number: int) -> NoReturn:
        asked.append(number)
        raise LookupError(f"no place for {number}")

    with pytest.raises(LookupError):
        await place.host(Caller).call("collect", Caller.collect, Callback(once), Callback(asked.append), 3)
    assert asked == [0, 0]


@pytest.fixture(scope="module")
def process() -> Iterator[Process]:
    with Process("caller") as process:
        yield process


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


async def test_work_that_goes_on_after_a_refusal_is_refused_again(process: Process) -> None:
    with pytest.raises(LookupError, match="no place for 1"):
        await process.host(Caller).call("ask", Caller.ask_again, Callback(broken))


async def test_a_reply_that_cannot_cross_is_refused(process: Process) -> None:
    caller = process.host(Caller)
    with pytest.raises(ModelError, match="cannot go to another process"):
        await caller.call("ask", Caller.ask_again, Callback(lambda number: lambda: number))  # type: ignore[arg-type]
    assert await caller.call("ask", Caller.ask_again, Callback(abs)) == 2


async def test_a_call_with_callbacks_may_be_given_shared_memory(process: Process) -> None:
    block = Block.new(1)

    def write(text: str) -> None:
        assert text == "begun"
        block[0] = 1

    assert await process.host(Caller).call("watch", Caller.watch, block, Callback(write, oneway=True)) == "seen"


async def test_a_child_that_dies_between_a_question_and_its_answer_is_lost() -> None:
    asked: list[int] = []

    def answer(number: int) -> int:
        asked.append(number)
        return number

    with (
        Process("caller") as process,
        pytest.raises(ModelLost, match=r"was killed by SIGKILL.*while it did 'ask'"),
    ):
        await process.host(Caller).call("ask", Caller.ask_and_die, Callback(answer))
    assert asked == [1]


async def test_a_call_that_calls_back_is_refused_where_it_would_be_repeated() -> None:
    with Process("caller", restarts=1) as process:
        with pytest.raises(ProtocolError, match=r"'ask' for 'caller' calls back.*restarts=1.*expected.*restarts=0"):
            await process.host(Caller).call("ask", Caller.ask_again, Callback(abs))
        assert await process.host(Total).call("add", Total.add, 1) == 1


PROGRAM = """
import time
import anyio
from oppo.placement import Callback, Process
from tests.placement.instances import Caller

def never(number):
    print("asked", flush=True)
    time.sleep(600)

async def main():
    with Process("caller") as process:
        await process.host(Caller).call("ask", Caller.ask_again, Callback(never))

anyio.run(main)
"""


def test_a_child_that_waits_for_an_answer_dies_with_its_parent() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment())
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "asked\n"
        parent.kill()
        assert parent.stdout.read() == "", "the output ends when nobody holds it any more, the child neither"
