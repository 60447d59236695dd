from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count

import pytest

from benchmarks import engine
from benchmarks.engine import LOADS, as_json, measure


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def test_every_load_is_measured_at_every_size_and_written() -> None:
    costs = measure((2, 9), 2, least_chunks=1)
    assert [(cost.load, cost.rollouts) for cost in costs] == [(name, size) for name in LOADS for size in (2, 9)]
    for cost in costs:
        assert len(cost.microseconds) == len(cost.collector) == 2
        assert all(0 <= part < whole for part, whole in zip(cost.collector, cost.microseconds, strict=True))
    written = as_json(costs)["costs"]
    assert isinstance(written, list)
    assert [each["median"] for each in written] == [cost.median for cost in costs]


@pytest.mark.usefixtures("no_collector")
def test_the_cost_is_time_by_the_given_clock_per_chunk_and_edge() -> None:
    ticks = count()  # read at the start and at the end only: one second passes
    costs = {cost.load: cost for cost in measure((5,), 1, least_chunks=1, clock=lambda: float(next(ticks)))}
    assert costs["edges"].chunks == 2 * 5 * engine.CHUNKS
    assert costs["edges"].median == pytest.approx(1e6 / costs["edges"].chunks / engine.EDGES)
    assert costs["step"].median == pytest.approx(1e6 / costs["step"].chunks)
    assert costs["edges"].per_second == round(1e6 / costs["edges"].median)
    line = engine.live((4, 5), 2, clock=lambda: float(next(ticks)))
    assert "4 live rollouts, 125.00 ms for each in a step, 0% of it gc; 5 live rollouts, 100.00 ms" in line
