from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from itertools import count

import pytest

from benchmarks.engine import loads
from benchmarks.engine.cost import LOADS, Cost, as_json, measure, show


def test_every_load_is_measured_at_every_size() -> None:
    costs = measure((2, 9), 2, least_chunks=1)
    assert [(cost.load, cost.rollouts) for cost in costs] == [(name, size) for name in LOADS for size in (2, 9)]
    assert all(len(cost.microseconds) == len(cost.collector) == 2 for cost in costs)
    assert all(
        0 <= part < whole for cost in costs for part, whole in zip(cost.collector, cost.microseconds, strict=True)
    )


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
def test_the_cost_is_time_by_the_given_clock_per_chunk_and_edge() -> None:
    ticks = count()  # read at the start and at the end only: one second passes
    costs = {cost.load: cost for cost in measure((5,), 1, least_chunks=1, clock=lambda: float(next(ticks)))}
    assert costs["edges"].chunks == 2 * 5 * loads.CHUNKS
    assert costs["edges"].median == pytest.approx(1e6 / costs["edges"].chunks / loads.EDGES)
    assert costs["step"].median == pytest.approx(1e6 / costs["step"].chunks)
    assert costs["edges"].per_second == round(1e6 / costs["edges"].median)


@pytest.mark.parametrize("name", LOADS)
async def test_a_load_says_that_it_is_ready_and_then_counts_the_chunks_of_each_step(name: str) -> None:
    first, *steps = [chunks async for chunks in LOADS[name].run(10, 3)]
    assert first == 0
    assert len(steps) == 3
    assert all(chunks > 0 for chunks in steps)


def test_the_table_and_the_json_hold_every_cost() -> None:
    costs = (Cost("edges", 10_000, 160_000, (2.0, 4.0, 3.0), (0.0, 0.5, 0.25)),)
    row = next(line for line in show(costs).splitlines() if line.startswith("edges"))
    assert row.split() == ["edges", "10,000", "3.00", "2.00", "4.00", "0.25", "333,333"]
    written = json.loads(json.dumps(as_json(costs)))
    assert written["costs"] == [
        {
            "load": "edges",
            "rollouts": 10_000,
            "chunks": 160_000,
            "median": 3.0,
            "min": 2.0,
            "max": 4.0,
            "collector": 0.25,
            "per_second": 333_333,
        }
    ]
