"""Choosing the depths of a workload's models: on hosts that are arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from benchmarks.ladder.calibration import (
    TRIES,
    WELL_WITHIN,
    Calibration,
    Costs,
    Depths,
    bounds_of,
    calibrate,
    choose,
    distance,
)
from benchmarks.ladder.record import StepRecord
from benchmarks.ladder.workloads import PAPER, RULE_REWARD, TRAIN_BOUND, BenchWorkload, Bound

BOUNDS = bounds_of(PAPER, "split")
ACTOR = PAPER.models.actor.layers


def host(score: float, update: float, fixed: float = 0.0) -> Callable[[BenchWorkload], Costs]:
    """Return what measures on a host where a layer costs so much of a decode of one second.

    Args:
        score: of the reward model.
        update: of actor and critic.
        fixed: what scoring and updating cost without a layer.
    """

    def measure(workload: BenchWorkload) -> Costs:
        depths = Depths.of(workload)
        reward, critic = fixed + score * depths.reward, 0.1 * score * depths.critic
        changed = fixed + update * (ACTOR + depths.critic)
        return Costs(1.0, 0.02, reward, critic, changed, whole=1.03 + reward + critic + changed)

    return measure


def calibrated(measure: Callable[[BenchWorkload], Costs]) -> Calibration:
    return calibrate(PAPER, BOUNDS, measure, lambda _: None)


def test_the_distance_is_that_of_the_worst_share_and_1_at_its_bound() -> None:
    bounds = [Bound("split", "decode", 0.5, 0.6), Bound("split", "score", 0.2, 0.4)]
    assert distance({"decode": 0.55, "score": 0.3, "update": 0.15}, bounds) == 0.0
    assert distance({"decode": 0.55, "score": 0.4, "update": 0.05}, bounds) == 1.0
    assert distance({"decode": 0.65, "score": 0.3, "update": 0.05}, bounds) == 2.0


def test_costs_are_those_of_all_steps_together() -> None:
    busy = {"reference": 0.25, "reward": 0.5, "critic": 0.25}
    step = StepRecord(4.0, 100, 10, decode=2.0, score=1.0, update=0.5, busy=busy)
    costs = Costs.of([step, step])
    assert costs == Costs(decode=4.0, reference=0.5, reward=1.0, critic=0.5, update=1.0, whole=8.0)
    assert costs.shares() == {"decode": 0.5, "score": 0.25, "update": 0.125}


def test_other_depths_cost_what_their_layers_cost() -> None:
    costs = Costs(decode=4.0, reference=0.5, reward=1.0, critic=0.5, update=2.2, whole=9.0)
    deeper = costs.at(Depths(20, 4), Depths(10, 2), actor_layers=20)
    assert deeper.reward == pytest.approx(2.0)
    assert deeper.critic == pytest.approx(1.0)
    assert deeper.update == pytest.approx(2.4)
    assert deeper.whole == pytest.approx(9.0 + 1.0 + 0.5 + 0.2)
    assert costs.at(Depths(10, 2), Depths(10, 2), 20) == costs


@given(score=st.floats(0.015, 0.06), update=st.floats(0.009, 0.013))
def test_where_costs_are_those_of_layers_one_choice_reaches_the_bounds(score: float, update: float) -> None:
    measure = host(score, update)
    start = Depths.of(PAPER)
    chosen = choose(measure(PAPER), start, ACTOR, BOUNDS)
    assert distance(measure(chosen.applied(PAPER)).shares(), BOUNDS) < 1


def test_a_host_whose_shares_are_well_within_their_bounds_keeps_the_depths_of_the_table() -> None:
    found = calibrated(host(0.0475, 0.0144))
    assert found.chosen.depths == Depths.of(PAPER)
    assert len(found.attempts) == 1


@pytest.mark.parametrize("fixed", [0.0, 0.05, 0.1])
def test_what_was_measured_corrects_what_was_expected(fixed: float) -> None:
    found = calibrated(host(0.02, 0.008, fixed))
    assert distance(found.chosen.shares, BOUNDS) <= WELL_WITHIN
    assert found.chosen.shares == host(0.02, 0.008, fixed)(found.chosen.depths.applied(PAPER)).shares()


def test_shares_out_of_reach_come_as_close_as_they_can_and_end() -> None:
    found = calibrated(host(0.02, 0.2))
    assert 1 < len(found.attempts) <= TRIES
    assert distance(found.chosen.shares, BOUNDS) > 1
    assert distance(found.chosen.shares, BOUNDS) == min(distance(each.shares, BOUNDS) for each in found.attempts)


def test_the_actor_and_everything_else_of_a_workload_stay() -> None:
    applied = Depths(17, 9).applied(PAPER)
    assert Depths.of(applied) == Depths(17, 9)
    assert Depths.of(PAPER).applied(applied) == PAPER
    assert applied.models.actor == PAPER.models.actor


def test_what_was_chosen_is_said_and_recorded() -> None:
    found = calibrated(host(0.02, 0.01))
    depths = found.chosen.depths
    assert (
        f"a reward model of {depths.reward} layers, a critic of {depths.critic}; shares decode 0." in found.sentence()
    )
    written = found.as_json()
    assert written["chosen"] == {
        "depths": {"reward": depths.reward, "critic": depths.critic},
        "shares": dict(found.chosen.shares),
    }


def test_only_a_workload_that_states_all_shares_of_a_layout_is_calibrated() -> None:
    assert len(BOUNDS) == 3
    assert not bounds_of(PAPER, "shared")
    assert not bounds_of(TRAIN_BOUND, "split")
    assert not bounds_of(RULE_REWARD, "split")
    assert not bounds_of(replace(PAPER, shares=PAPER.shares[:2]), "split")
