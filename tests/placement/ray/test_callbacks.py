"""Functions that are given to a call in an actor and stay with the driver; and blocks that are read while it goes on.

What holds for callbacks in every other place holds here: those tests are run again.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial

import anyio
import pytest
import ray

from oppo.errors import ModelError, ModelLost, ProtocolError
from oppo.observe import silent
from oppo.placement import Callback, Hosted
from oppo.placement.ray import Cluster, RayPlace
from oppo.placement.shared_memory import Block, Gauge, Notice
from tests.placement.instances import Caller, Meter, Total
from tests.placement.test_callback import (  # noqa: F401 - run with this module's places
    test_a_call_is_given_answers_and_what_it_tells_is_heard_in_order,
    test_a_callback_is_carried_out_here_while_the_event_loop_goes_on,
    test_a_reply_that_cannot_cross_is_refused,
    test_after_the_first_error_no_callback_is_carried_out,
    test_an_error_of_a_callback_ends_the_call_as_itself_and_the_place_goes_on,
    test_an_error_of_the_last_thing_told_ends_the_call_too,
    test_callbacks_may_be_given_by_name,
)

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def place(cluster: Cluster) -> Iterator[RayPlace]:
    with RayPlace("caller", cluster, restarts=0) as place:
        yield place


@pytest.fixture
def process(place: RayPlace) -> RayPlace:
    """The place, by the name that tests of processes have for it."""
    return place


async def test_an_actor_that_dies_between_a_question_and_its_answer_is_lost(cluster: Cluster) -> None:
    with (
        RayPlace("caller", cluster, restarts=0) as place,
        anyio.fail_after(60),
        pytest.raises(ModelLost, match=r"died, because its worker process has died.* while it did 'ask' for 'caller'"),
    ):
        await place.host(Caller).call("ask", Caller.ask_and_die, Callback(abs))


async def test_an_actor_that_is_killed_while_its_question_is_answered_is_lost(cluster: Cluster) -> None:
    with RayPlace("caller", cluster, restarts=0) as place:

        def kill(number: int) -> int:
            os.kill(place.pid, signal.SIGKILL)
            return number

        with pytest.raises(ModelLost, match="while it did 'ask' for 'caller'"):
            await place.host(Caller).call("ask", Caller.ask_again, Callback(kill))


async def test_a_call_that_calls_back_is_refused_where_it_would_be_repeated(cluster: Cluster) -> None:
    with RayPlace("caller", cluster, restarts=1) as place:
        with pytest.raises(ProtocolError, match=r"'ask' for 'caller' calls back.*restarts=1: expected restarts=0"):
            await place.host(Caller).call("ask", Caller.ask_again, Callback(abs))
        assert await place.host(Total).call("add", Total.add, 1) == 1


async def test_a_notice_is_seen_by_a_call_that_goes_on_and_so_is_one_that_was_written_before(place: RayPlace) -> None:
    caller = place.host(Caller)
    early, late = Notice.new(2), Notice.new(2)
    early.write_at(0, b"\5")
    assert await caller.call("watch", Caller.watch, early, Callback(lambda _: None)) == "seen"
    assert await caller.call("watch", Caller.watch, late, Callback(lambda _: late.write_at(0, b"\1"))) == "seen"
    with pytest.raises(ModelError, match="memory is not shared"):
        await caller.call("watch", Caller.watch, Block.new(1), Callback(abs))  # type: ignore[arg-type]


async def test_what_is_told_between_a_quiet_while_and_the_answer_is_heard(
    place: RayPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver asks whether a quiet call has been answered; just then it tells something and is."""
    notice, heard, wait = Notice.new(1), list[int](), ray.wait

    def late(answers: list[ray.ObjectRef[object]], timeout: float) -> object:
        assert timeout == 0
        notice.write_at(0, b"\1")
        return wait(answers, timeout=60)

    monkeypatch.setattr(ray, "wait", late)
    caller = place.host(Caller)
    assert await caller.call("tell", Caller.tell_at_last, notice, Callback(heard.append, oneway=True)) == "told"
    assert heard == [1]


async def test_a_gauge_is_right_at_each_question_at_each_answer_and_soon_while_nothing_is_asked(
    place: RayPlace,
) -> None:
    gauge, seen = Gauge.new(3), list[int]()
    meters: list[Hosted[Meter]] = [place.host(partial(Meter, gauge)) for _ in range(2)]

    def ask(number: int) -> int:
        seen.append(gauge[0])
        return number

    await meters[0].call("count", Meter.count, Callback(ask), 3)
    assert seen == [1, 2, 3]
    await meters[1].call("note", Meter.note, 7)
    assert gauge[:] == b"\3\0\7", "both write it"
    over = Notice.new(1)
    with anyio.fail_after(60):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(meters[0].call, "count", Meter.count_until, over, Callback(silent, oneway=True))
            while not gauge[1]:  # noqa: ASYNC110 - nothing announces it
                await anyio.sleep(0.01)
            over.write_at(0, b"\1")


async def test_every_order_is_answered_in_one_thread_which_setup_has_prepared(cluster: Cluster) -> None:
    with RayPlace("caller", cluster, restarts=0, setup=mark_thread) as place:
        caller = place.host(Caller)
        for _ in range(3):
            assert await caller.call("look", is_marked)
            assert await caller.call("look", is_marked_while_asking, Callback(abs))


_local = threading.local()


def mark_thread() -> None:
    _local.marked = True


def is_marked(caller: Caller) -> bool:
    return getattr(_local, "marked", False)


def is_marked_while_asking(caller: Caller, ask: Callable[[int], int]) -> bool:
    return ask(-1) == 1 and is_marked(caller)
