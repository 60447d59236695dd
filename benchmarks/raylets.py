"""A Ray cluster of two raylets of this machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ray.cluster_utils import Cluster as Raylets
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from oppo.placement.ray import Cluster

STORE: Final = 80 * 2**20
"""Bytes of an object store; Ray takes no less than 75 MB."""


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
