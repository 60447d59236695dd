"""What a call costs in each place: ``python -m benchmarks.remote_call``, on two raylets of this machine.

A call carries a chunk of 64 token ids there and a number back, and computes nothing.
"""

from __future__ import annotations

import importlib
import statistics
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import anyio
import numpy as np
from numpy.typing import NDArray
from ray.cluster_utils import Cluster as Raylets
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from benchmarks.harness import command
from oppo.observe import now
from oppo.placement import Hosted, Inline, Place, Process, Thread
from oppo.placement.ray import Cluster, RayPlace

STORE: Final = 80 * 2**20  # bytes of an object store; Ray takes no less than 75 MB


@contextmanager
def two_raylets() -> Iterator[tuple[Cluster, NodeAffinitySchedulingStrategy]]:
    """Return this process's connection to them, and the strategy that puts an actor on the one that is not its own."""
    room: dict[str, Any] = {"num_cpus": 2, "object_store_memory": STORE, "include_dashboard": False}
    Path("/tmp/ray").mkdir(exist_ok=True)
    raylets = Raylets(initialize_head=True, head_node_args=room)
    try:
        node: Any = raylets.add_node(**room)
        with Cluster(raylets.address) as cluster:
            yield cluster, NodeAffinitySchedulingStrategy(node.node_id, soft=False)
    finally:
        raylets.shutdown()


PROGRAM: Final = "benchmarks.remote_call"
CHUNK: Final = np.arange(64, dtype=np.int32)
WARM: Final = 50  # calls that are not counted


class Length:
    def __init__(self) -> None:
        self.total = 0

    def extend(self, tokens: NDArray[np.int32]) -> int:
        self.total += len(tokens)
        return self.total


async def milliseconds(place: Place, calls: int) -> list[float]:
    length: Hosted[Length] = place.host(Length)
    took = []
    for _ in range(WARM + calls):
        begun = now()
        await length.call("extend", Length.extend, CHUNK)
        took.append((now() - begun) * 1e3)
    return took[WARM:]


def compare(*, calls: int = 1000) -> None:
    """Print the median and the tail of a call in a thread, in a process, and in an actor on another raylet.

    Args:
        calls: how many of each are counted.
    """
    with ExitStack() as stack:
        cluster, other = stack.enter_context(two_raylets())
        places: dict[str, Place] = {
            "inline": Inline("length"),
            "thread": Thread("length"),
            "process": Process("length"),
            "actor on another raylet": RayPlace("length", cluster, strategy=other),
        }
        for name, place in places.items():
            with place:
                took = anyio.run(milliseconds, place, calls)
            tail = statistics.quantiles(took, n=100)[-1]
            print(f"{name:24} median {statistics.median(took):6.2f} ms, 99 of 100 within {tail:6.2f} ms")


def main(arguments: Sequence[str] | None = None) -> int:
    return command(PROGRAM, "What a call costs in each place.", compare, arguments)


if __name__ == "__main__":
    sys.exit(importlib.import_module(PROGRAM).main())  # what is called in a place is not of the program itself
