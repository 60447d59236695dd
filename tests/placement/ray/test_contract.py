"""What holds in every place, in actors; and blocks that are read and written while a call goes on."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from functools import partial

import anyio
import pytest
import ray

from oppo.errors import ModelError, ModelLost
from oppo.observe import silent
from oppo.placement import Callback, Hosted, Place
from oppo.placement.ray import Cluster, RayPlace, RayRanks
from oppo.placement.shared_memory import Block, Gauge, Notice
from tests.placement import test_contract
from tests.placement.instances import Caller, Meter
from tests.placement.test_contract import Kind, pipes, place  # noqa: F401 - fixtures

globals().update({name: test for name, test in vars(test_contract).items() if name.startswith("test_")})

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

DIED = "died, because its worker process has died"


@pytest.fixture(scope="module", params=["actor", "ranks"])
def kind(request: pytest.FixtureRequest, cluster: Cluster) -> Kind:
    if request.param == "actor":
        return Kind(lambda name, **options: RayPlace(name, cluster, **{"restarts": 0, **options}), "actor of", DIED)
    made = partial(RayRanks, cluster=cluster, count=2)
    return Kind(made, "group of ranks of", rf"rank \d of 'scorers' \(.*\) ({DIED}|was killed by SIGKILL)")


@pytest.fixture
def apart(kind: Kind) -> Kind:
    return kind


@pytest.fixture(scope="module")
def actor(cluster: Cluster) -> Kind:
    return Kind(partial(RayPlace, cluster=cluster), "actor of", DIED)


@pytest.fixture
def replaced(actor: Kind) -> Kind:
    return actor


@pytest.fixture(scope="module")
def process(actor: Kind) -> Iterator[RayPlace]:
    with actor.make("caller", restarts=0) as process:
        yield process


@pytest.fixture(scope="module")
def calling(process: RayPlace) -> Place:
    return process


async def test_an_actor_that_is_killed_while_its_question_is_answered_is_lost(cluster: Cluster) -> None:
    with RayPlace("caller", cluster, restarts=0) as process:

        def kill(number: int) -> int:
            os.kill(process.pid, signal.SIGKILL)
            return number

        with pytest.raises(ModelLost, match="while it did 'ask' for 'caller'"):
            await process.host(Caller).call("ask", Caller.ask_again, Callback(kill))


async def test_a_notice_is_seen_by_a_call_that_goes_on_and_so_is_one_that_was_written_before(process: RayPlace) -> None:
    caller = process.host(Caller)
    early, late = Notice.new(2), Notice.new(2)
    early.write_at(0, b"\5")
    assert await caller.call("watch", Caller.watch, early, Callback(lambda _: None)) == "seen"
    assert await caller.call("watch", Caller.watch, late, Callback(lambda _: late.write_at(0, b"\1"))) == "seen"
    with pytest.raises(ModelError, match="memory is not shared"):
        await caller.call("watch", Caller.watch, Block.new(1), Callback(abs))  # type: ignore[arg-type]


async def test_what_is_told_between_a_quiet_while_and_the_answer_is_heard(
    process: RayPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver asks whether a quiet call has been answered; just then it tells something and is."""
    notice, heard, wait = Notice.new(1), list[int](), ray.wait

    def late(answers: list[ray.ObjectRef[object]], timeout: float) -> object:
        assert timeout == 0
        notice.write_at(0, b"\1")
        return wait(answers, timeout=60)

    monkeypatch.setattr(ray, "wait", late)
    caller = process.host(Caller)
    assert await caller.call("tell", Caller.tell_at_last, notice, Callback(heard.append, oneway=True)) == "told"
    assert heard == [1]


async def test_a_gauge_is_right_at_each_question_at_each_answer_and_soon_while_nothing_is_asked(
    process: RayPlace,
) -> None:
    gauge, seen = Gauge.new(3), list[int]()
    meters: list[Hosted[Meter]] = [process.host(partial(Meter, gauge)) for _ in range(2)]

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
    with RayPlace("caller", cluster, restarts=0, setup=mark_thread) as process:
        caller = process.host(Caller)
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
