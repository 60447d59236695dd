"""Actors as places: calls, errors, clocks, deaths of actors and of machines, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import anyio
import pytest

from oppo.errors import ModelError, ModelLost, ProtocolError, SessionsLost
from oppo.observe import Span, now
from oppo.placement import Callback, Hosted
from oppo.placement.ray import Cluster, RayPlace, Room
from oppo.placement.shared_memory import Block
from tests.placement.instances import Caller, Slate, Total, fail_to_set_up
from tests.placement.ray.machines import MARK, SECONDS, Machines

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


async def test_calls_are_made_in_an_actor_and_timed_on_this_clock(cluster: Cluster) -> None:
    spans: list[Span] = []
    with RayPlace("total", cluster, listener=spans.append) as place:
        total: Hosted[Total] = place.host(partial(Total, 1), track="sum")
        begun = now()
        assert await total.call("add", Total.add, 2, times=3) == 7
        ended = now()
        await total.load(Total.add, 1)
        assert await total.call("pid", Total.pid) == place.pid != os.getpid()
        with pytest.raises(ZeroDivisionError) as raised:
            await total.call("fail", Total.fail)
        assert "in the process of 'total'" in raised.value.__notes__[0]
        with pytest.raises(ProtocolError, match="calls back"):
            await place.host(Caller).call("tell", Caller.tell, Callback(int, oneway=True), 1)  # type: ignore[arg-type]
    assert [(span.track, span.label) for span in spans[:3]] == [("sum", "add"), ("sum", "load"), ("sum", "pid")]
    assert begun <= spans[0].start <= spans[0].end <= ended
    with pytest.raises(ModelLost, match="the actor of 'total' is closed, so it cannot do 'add'"):
        await total.call("add", Total.add, 1)


async def test_what_holds_memory_of_this_machine_is_refused(cluster: Cluster) -> None:
    with (
        RayPlace("slate", cluster) as place,
        pytest.raises(ModelError, match="memory is not shared between machines, so 'slate'"),
    ):
        place.host(partial(Slate, Block.new(8)))


async def test_a_setup_that_fails_is_the_error_of_the_first_call(cluster: Cluster) -> None:
    with RayPlace("total", cluster, setup=fail_to_set_up) as place:
        place.host(Total)
        with pytest.raises(OSError, match="no such core"):
            place.wait_until_ready()


async def test_no_room_is_said_with_what_was_asked_for(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setattr("oppo.placement.ray.SILENCE", 0.2)
    with RayPlace("total", cluster, room=Room(cpus=2, gpus=1), patience=1) as place:
        place.host(Total)
        with pytest.raises(
            ModelError, match=r"no machine .* had room for 'total', which takes 2 CPU, 1 GPU, in 1 s; free, in all: \d"
        ):
            place.wait_until_ready()
    (waiting,) = messages
    assert "'total' waits for room in the cluster: it takes 2 CPU, 1 GPU, and free are, in all, " in waiting
    assert "at most 1 s" in waiting


async def test_actors_that_fit_one_by_one_but_not_together_say_that_they_wait(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    monkeypatch.setattr("oppo.placement.ray.SILENCE", 0.2)
    whole = Room(cpus=4)
    with RayPlace("one", cluster, room=whole) as one, RayPlace("two", cluster, room=whole) as two_:
        for place in (one, two_):
            place.host(Total)
            place.wait_until_ready()
        with RayPlace("three", cluster, room=whole, patience=1) as three:
            three.host(Total)
            with pytest.raises(ModelError, match="had room for 'three'"):
                three.wait_until_ready()
    assert sum("'three' waits for room" in message for message in messages) == 1


async def test_a_dead_actor_is_replaced_and_gets_what_was_loaded(cluster: Cluster, messages: list[str]) -> None:
    with RayPlace("total", cluster, restarts=1) as place, anyio.fail_after(300):
        total = place.host(Total)
        await total.load(Total.add, 100)
        assert await total.call("add", Total.add, 5) == 105
        first = place.pid
        os.kill(first, signal.SIGKILL)
        with pytest.raises(SessionsLost):
            await total.call("add", Total.add, 1)
        assert await total.call("add", Total.add, 1) == 101, "what was loaded, then this"
        assert place.pid != first
        assert "it is started again (1 of 1)" in messages[0]
        assert f"(pid {first} on " in messages[0]
        assert "died, because its worker process has died" in messages[0]
        os.kill(place.pid, signal.SIGKILL)
        with pytest.raises(ModelLost, match="no more than restarts=1"):
            await total.call("add", Total.add, 1)
        place.abort()
        with pytest.raises(ModelLost, match="its worker process has died"):  # which it had done before it was killed
            await total.call("add", Total.add, 1)


async def test_aborting_ends_a_call_in_progress(cluster: Cluster) -> None:
    with RayPlace("total", cluster) as place, anyio.fail_after(300):
        total = place.host(Total)
        place.wait_until_ready()
        async with anyio.create_task_group() as tasks:

            async def wait() -> None:
                with pytest.raises(ModelLost, match="was killed by this process while it did 'sleep' for 'total'"):
                    await total.call("sleep", sleep, 600.0)

            tasks.start_soon(wait)
            while place.at_work != "total: sleep":  # noqa: ASYNC110 - nothing announces it
                await anyio.sleep(0.01)
            place.abort()


async def test_closed_places_leave_no_process(two: Machines, cluster: Cluster) -> None:
    before = two.pids()
    with RayPlace("total", cluster) as place:
        place.host(Total)
        place.wait_until_ready()
        assert place.pid in two.pids() - before
    assert not two.settled(before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_driver_that_is_ended_leaves_no_process_on_any_machine(two: Machines, number: signal.Signals) -> None:
    before = two.pids()
    command = [sys.executable, "-m", "tests.placement.ray.program", two.address]
    with subprocess.Popen(command, env={**os.environ, MARK: two.mark}, stdout=subprocess.PIPE, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        assert len(two.pids() - before) >= 4, "the driver, an actor, and two ranks"
        driver.send_signal(number)
        driver.wait(60)
    assert not two.settled(before)


def test_sigterm_stays_with_what_handled_it(cluster: Cluster) -> None:
    assert signal.getsignal(signal.SIGTERM) in {signal.SIG_DFL, signal.SIG_IGN}


def sleep(total: Total, seconds: float) -> None:
    time.sleep(seconds)


PROGRAM = """
import os, sys
from tests.placement.ray.machines import machines
with machines(1) as cluster:
    print(cluster.mark, flush=True)
    os.kill(os.getpid(), int(sys.argv[1]))
"""


@pytest.mark.parametrize("by", [signal.SIGTERM, signal.SIGKILL])
def test_machines_and_their_files_end_with_tests_that_are_killed(by: signal.Signals) -> None:
    folders = set(Path(tempfile.gettempdir()).glob("oppo-ray-*"))
    command = [sys.executable, "-c", PROGRAM, str(int(by))]
    killed = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert killed.returncode == -by
    assert not Machines("", killed.stdout.strip(), None).settled(set())  # type: ignore[arg-type]  # it has none any more
    deadline = time.monotonic() + SECONDS
    while left := set(Path(tempfile.gettempdir()).glob("oppo-ray-*")) - folders:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
