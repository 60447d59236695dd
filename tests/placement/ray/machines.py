"""Machines of a Ray cluster, played by raylets of this one in a process of their own; and what is left of them.

The processes of a cluster, and those of programs that use it, are found by a mark in their environment.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

MARK = "OPPO_TEST_CLUSTER"

STORE = 80 * 2**20
"""Bytes of an object store; Ray takes no less than 75 MB."""

HEALTH = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 5000,
    "health_check_failure_threshold": 3,
}
"""A dead machine is noticed within seconds, and a slow one is not taken for dead."""

SECONDS = 120.0
"""Within which everything happens, on however slow a machine."""


@dataclass(frozen=True)
class Machine:
    """A machine: the process of its raylet, and its name in the cluster."""

    raylet: int
    node: str


@dataclass
class Machines:
    """A cluster with a head, where the driver is, and other machines.

    Attributes:
        address: of its head.
        mark: in the environment of all its processes.
        all: the machines, the head first.
    """

    address: str
    mark: str
    process: subprocess.Popen[str]
    all: list[Machine] = field(default_factory=list)

    def add(self) -> Machine:
        said = self._asked("add")
        self.all.append(Machine(said["raylet"], said["node"]))
        return self.all[-1]

    def lose(self, machine: Machine) -> None:
        """Let a machine die: its raylet is killed, and its other processes end."""
        self.all.remove(machine)
        self._asked(f"lose {machine.raylet}")

    def _asked(self, order: str) -> dict[str, Any]:
        print(order, file=cast("IO[str]", self.process.stdin), flush=True)
        return _told(self.process)

    def pids(self) -> set[int]:
        """Return the processes of the cluster, and of what was started with its mark.

        Idle workers are left out: a machine keeps some for whoever comes next.
        """
        marked = f"{MARK}={self.mark}".encode()
        found = set()
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                idle = (folder / "cmdline").read_bytes().startswith(b"ray::IDLE")
                if not idle and marked in (folder / "environ").read_bytes().split(b"\0"):
                    found.add(int(folder.name))
        return found

    def settled(self, before: set[int]) -> set[int]:
        """Return what runs now and did not before, once that is nothing, or at the latest after a while."""
        deadline = time.monotonic() + SECONDS
        while (more := self.pids() - before) and time.monotonic() < deadline:
            time.sleep(0.2)
        return more


@contextmanager
def machines(count: int = 2, *, cpus: int = 4) -> Iterator[Machines]:
    """Start a cluster of ``count`` machines that have so many cores each, as far as Ray knows."""
    mark, folder = uuid.uuid4().hex, tempfile.mkdtemp(prefix="oppo-ray-", dir="/tmp")
    niceness = {"RAY_worker_niceness": "0"}  # or whatever else runs here goes first
    environment = {**os.environ, MARK: mark, "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", **niceness}
    process = subprocess.Popen(
        [sys.executable, __file__, folder, str(cpus)],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        head = _told(process)
        cluster = Machines(head["address"], mark, process, [Machine(head["raylet"], head["node"])])
        for _ in range(count - 1):
            cluster.add()
        yield cluster
    finally:
        cast("IO[str]", process.stdin).close()
        try:
            process.wait(SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            shutil.rmtree(folder, ignore_errors=True)
        cast("IO[str]", process.stdout).close()


def _told(process: subprocess.Popen[str]) -> dict[str, Any]:
    """Return what the cluster's process says next, whatever Ray says in between."""
    for line in cast("IO[str]", process.stdout):
        if line.startswith("{"):
            said: dict[str, Any] = json.loads(line)
            return said
    raise AssertionError(f"the cluster ended with exit code {process.wait()}")


def _serve(folder: str, cpus: int) -> None:
    """Run a cluster until the standard input is closed, as it is when whoever has it is killed, or until SIGTERM."""
    from ray.cluster_utils import Cluster

    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    room: dict[str, Any] = {"num_cpus": cpus, "object_store_memory": STORE, "include_dashboard": False}
    Path("/tmp/ray").mkdir(exist_ok=True)  # where Ray notes the address, wherever its other files are
    cluster = Cluster(initialize_head=True, head_node_args={**room, "_system_config": HEALTH, "temp_dir": folder})
    try:
        _obey(cluster, room)
    finally:
        cluster.shutdown()
        shutil.rmtree(folder, ignore_errors=True)


def _obey(cluster: Any, room: dict[str, Any]) -> None:
    _tell(address=cluster.address, **_found(cluster.head_node))
    raylets: dict[int, Any] = {}
    for order in sys.stdin:
        if order.startswith("lose"):
            raylet = raylets[int(order.split()[1])]
            raylet.kill()
            raylet.wait()  # those that it has started look for it, and a zombie would be there
            _tell()
        else:
            node = cluster.add_node(**room)
            raylet = node.all_processes["raylet"][0].process
            raylets[raylet.pid] = raylet
            _tell(**_found(node))


def _found(node: Any) -> dict[str, object]:
    return {"raylet": node.all_processes["raylet"][0].process.pid, "node": node.node_id}


def _tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)  # noqa: T201 - to its parent


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
