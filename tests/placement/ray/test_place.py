"""Actors as places: room, deaths of actors and of machines, and nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import pytest

from oppo.errors import ModelError
from oppo.placement.ray import Cluster, RayPlace, Room
from oppo.placement.shared_memory import Block
from tests.placement.instances import Slate, Total
from tests.placement.ray.machines import MARK, SECONDS, Machines

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]


async def test_what_holds_memory_of_this_machine_is_refused(cluster: Cluster) -> None:
    with (
        RayPlace("slate", cluster) as place,
        pytest.raises(ModelError, match="memory is not shared between machines, so 'slate'"),
    ):
        place.host(partial(Slate, Block.new(8)))


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
