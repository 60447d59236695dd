"""The arithmetic between records, figures, their validity, and the depths of a workload's models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from benchmarks.ladder.contestant import StepRecord
from benchmarks.ladder.measures import (
    TRIES,
    WELL_WITHIN,
    Baseline,
    Costs,
    DecodeCost,
    Depths,
    Figures,
    bounds_of,
    calibrate,
    choose,
    distance,
    faults,
    ratios,
    require_equal_work,
)
from benchmarks.ladder.workloads import PAPER, TRAIN_BOUND, BenchWorkload, Bound
from oppo.errors import ProtocolError

STEP = StepRecord(
    seconds=4.0,
    tokens=100,
    samples=10,
    capped=1,
    decode=2.0,
    score=1.2,
    update=0.8,
    exposed=1.2,
    busy={"actor": 2.0, "reward": 1.2, "trainer": 0.8},
    decode_steps=50,
    decoded=100,
)
BOUNDS = bounds_of(PAPER, "split")
ACTOR = PAPER.models.actor.layers


def figures(*steps: StepRecord, score: float | None = None, cost: DecodeCost | None = None) -> Figures:
    return Figures.of([steps], Baseline(score, cost), 100.0)


def test_hiding_is_measured_against_the_serial_scoring_and_bought_with_slower_decoding() -> None:
    overlapped = replace(STEP, seconds=4.0, decode=3.2, score=2.0, exposed=0.0)
    chunk = figures(overlapped, score=1.2, cost=DecodeCost.fitted([STEP]))
    assert chunk.hidden_fraction == 1.0
    assert chunk.decode_slowdown == pytest.approx(1.6)
    assert figures(replace(overlapped, exposed=0.3), score=1.2).hidden_fraction == pytest.approx(0.75)


def test_the_cost_of_decoding_alone_is_found_from_steps_of_different_occupancy() -> None:
    alone = [
        replace(STEP, decode_steps=steps, decoded=tokens, decode=0.01 * steps + 0.001 * tokens)
        for steps, tokens in ((100, 400), (300, 700), (50, 900))
    ]
    cost = DecodeCost.fitted(alone)
    assert cost is not None
    assert (cost.per_step, cost.per_token) == pytest.approx((0.01, 0.001))


def test_a_peer_that_cannot_look_inside_has_speeds_only() -> None:
    peer = figures(StepRecord(seconds=8.0, tokens=100, samples=10), score=1.2, cost=DecodeCost.fitted([STEP]))
    assert peer.tokens_per_second == 12.5
    assert (peer.hidden_fraction, peer.decode_slowdown, peer.live_rows_per_decode_step) == (None, None, None)
    assert peer.shares == {}
    phases = figures(StepRecord(seconds=8.0, tokens=100, samples=10, decode=4.0, score=2.0, update=2.0), score=1.2)
    assert phases.shares == {"decode": 0.5, "score": 0.25, "update": 0.25}
    assert phases.hidden_fraction is None, "what it hides is not of our scoring"


def test_a_mode_is_compared_with_serial_with_what_it_adds_to_and_with_peers() -> None:
    counted = {name: [[replace(STEP, seconds=took)]] for name, took in (("serial", 4.0), ("chunk", 3.0), ("trl", 12.0))}
    found = ratios(counted | {"adaptive": [[replace(STEP, seconds=2.0)]]})
    assert {name: spread.median for name, spread in found.items()} == pytest.approx(
        {
            "chunk/serial": 4 / 3,
            "trl/serial": 1 / 3,
            "adaptive/serial": 2.0,
            "adaptive/chunk": 1.5,
            "serial/trl": 3.0,
            "chunk/trl": 4.0,
            "adaptive/trl": 6.0,
        }
    )


@pytest.mark.parametrize("other", [replace(STEP, samples=9), replace(STEP, tokens=97)], ids=["samples", "tokens"])
def test_contestants_that_train_other_amounts_are_an_error_that_names_them(other: StepRecord) -> None:
    serial, close = [[STEP], [STEP]], [[STEP], [replace(STEP, tokens=97)]]
    deferred = [[replace(STEP, tokens=80, deferred=2)], [STEP]]
    require_equal_work({"serial": serial, "adaptive": deferred, "trl-grpo": close})
    with pytest.raises(ProtocolError, match=r"serial.*trl-grpo"):
        require_equal_work({"serial": serial, "adaptive": deferred, "trl-grpo": [[other], [other]]})


def test_outside_of_the_stated_shares_or_lengths_a_run_is_invalid_and_names_them() -> None:
    serial, drifted = figures(STEP, score=1.2), figures(replace(STEP, as_announced=0.5))
    wanted = replace(PAPER, shares=(Bound("split", "score", 0.25, 0.30),), capped=(0.0, 0.2))
    assert faults(wanted, "split", {"serial": serial}, 0.1) == []
    narrow = replace(wanted, shares=(Bound("split", "score", 0.25, 0.29),))
    (fault,) = faults(narrow, "split", {"serial": serial}, 0.1)
    assert {"score", "0.300", "0.29"} <= set(fault.split())
    assert faults(narrow, "shared", {"serial": serial}, 0.1) == []
    assert faults(wanted, "split", {"chunk": serial}, 0.1), "unknown shares are none that the workload states"
    capped, announced = faults(replace(PAPER, shares=()), "split", {"chunk": drifted}, 0.05)
    assert "0.050" in capped
    assert {"chunk:", "0.500"} <= set(announced.split())


def host(score: float, update: float, fixed: float = 0.0) -> Callable[[BenchWorkload], Costs]:
    def measure(workload: BenchWorkload) -> Costs:
        depths = Depths.of(workload)
        reward, critic = fixed + score * depths.reward, 0.1 * score * depths.critic
        changed = fixed + update * (ACTOR + depths.critic)
        return Costs(1.0, 0.02, reward, critic, changed, whole=1.03 + reward + critic + changed)

    return measure


@given(score=st.floats(0.015, 0.06), update=st.floats(0.009, 0.013))
def test_where_costs_are_those_of_layers_one_choice_reaches_the_bounds(score: float, update: float) -> None:
    measure = host(score, update)
    chosen = choose(measure(PAPER), Depths.of(PAPER), ACTOR, BOUNDS)
    assert distance(measure(chosen.applied(PAPER)).shares(), BOUNDS) < 1


def test_calibration_tries_again_with_what_was_measured_and_ends_where_shares_are_out_of_reach() -> None:
    found = calibrate(PAPER, BOUNDS, host(0.02, 0.008, 0.1))
    assert distance(found.chosen.shares, BOUNDS) <= WELL_WITHIN
    assert found.chosen.shares == host(0.02, 0.008, 0.1)(found.chosen.depths.applied(PAPER)).shares()
    found = calibrate(PAPER, BOUNDS, host(0.02, 0.2))
    assert 1 < len(found.attempts) <= TRIES
    assert 1 < distance(found.chosen.shares, BOUNDS) == min(distance(each.shares, BOUNDS) for each in found.attempts)


def test_only_a_workload_that_states_all_shares_of_a_layout_is_calibrated() -> None:
    assert len(BOUNDS) == 3
    assert not bounds_of(PAPER, "shared")
    assert not bounds_of(TRAIN_BOUND, "split")
    assert not bounds_of(replace(PAPER, shares=tuple(BOUNDS[:2])), "split")
