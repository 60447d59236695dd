"""A cluster for the tests of a module, and the driver's connection to it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oppo.placement.ray import Cluster
from tests.placement.ray.machines import Machines, machines


@pytest.fixture(scope="module")
def two() -> Iterator[Machines]:
    with machines(2) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def cluster(two: Machines) -> Iterator[Cluster]:
    with Cluster(two.address) as connected:
        yield connected
