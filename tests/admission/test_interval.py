"""The law of the cut interval against a simulation of the ledger, and its limits."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from oppo.admission import Overcommit
from oppo.admission.forecast import KNOTS, Survival, cut_intervals, kaplan_meier, knots
from oppo.events import Prompt
from oppo.stages.ledger import Ledger


def simulated(lengths: NDArray[np.int64], admission: Overcommit, steps: int) -> float:
    """Return the mean decode steps of a step, by the ledger itself, half of the steps left out."""
    ledger, made, taken, intervals = Ledger(admission), dict[int, int](), 0, []
    for step in range(steps):
        count = ledger.wanted(steps)
        new = [(Prompt(n, n, np.zeros(1, np.int32)),) for n in range(taken, taken + count)]
        taken += count
        live = {r for unit in ledger.deferred for r in unit.unfinished} | {group[0].rollout for group in new}
        ledger.begin(new)
        before = made.copy()
        while live and not ledger.is_cut():
            left = {r: int(lengths[r]) - made.get(r, 0) for r in live}
            stride = min(left.values())
            for r in live:
                made[r] = made.get(r, 0) + stride
            ended = sorted(r for r in live if left[r] == stride)
            live -= set(ended)
            ledger.finished(ended)
        if step >= steps // 2:
            intervals.append(max((made[r] - before.get(r, 0) for r in made), default=0))
        ledger.end()
    return float(np.mean(intervals))


def lognormal(count: int, sigma: float, cap: int, seed: int = 0) -> NDArray[np.int64]:
    random = np.random.default_rng(seed)
    return np.minimum(cap, (100 * np.exp(sigma * random.standard_normal(count))).astype(np.int64) + 1)


@pytest.mark.parametrize("sigma", [0.4, 0.9])
@pytest.mark.parametrize(("extra", "max_deferrals"), [(0, 2), (4, 2), (8, 2), (12, 1), (12, 6)])
def test_the_law_agrees_with_the_ledger(sigma: float, extra: int, max_deferrals: int) -> None:
    lengths = lognormal(10_000, sigma, 2_000)
    curve = kaplan_meier(lengths.tolist(), parked=[])
    predicted = cut_intervals(curve, 48, extra, max_deferrals)[extra]
    measured = simulated(lengths, Overcommit(48, extra, max_deferrals), steps=160)
    # A bound of 1 makes long and short steps alternate, which a law of means does not see.
    assert predicted == pytest.approx(measured, rel=0.12 if max_deferrals == 1 else 0.08)


def test_without_extra_units_it_is_the_expected_longest_of_a_batch() -> None:
    uniform = Survival(np.arange(1, 1001, dtype=np.float64), 1 - np.arange(1, 1001) / 1000)
    (longest,) = cut_intervals(uniform, 50, most=0, max_deferrals=2)
    assert longest == pytest.approx(1000 * 50 / 51, rel=0.01)


def test_more_extra_units_never_make_it_longer() -> None:
    curve = kaplan_meier(lognormal(900, 0.8, 4_000).tolist(), parked=[])
    assert bool(np.all(np.diff(cut_intervals(curve, 112, 28, 2)) <= 0))


def test_while_more_are_at_the_cap_than_may_be_carried_nothing_is_gained() -> None:
    lengths = np.where(np.arange(1_000) % 8 == 0, 2_000, lognormal(1_000, 0.5, 2_000))  # an eighth at the cap
    intervals = cut_intervals(kaplan_meier(lengths.tolist(), parked=[]), 112, 28, 2)
    assert intervals[:7] == pytest.approx(np.full(7, 2_000), rel=0.03)
    assert intervals[28] < 0.75 * 2_000


@pytest.mark.parametrize("sigma", [0.4, 0.9])
def test_many_extra_units_are_predicted_as_few_are(sigma: float) -> None:
    curve = kaplan_meier(lognormal(3_000, sigma, 2_000).tolist(), parked=[])
    few, many = cut_intervals(curve, 256, KNOTS - 1, 2), cut_intervals(curve, 256, 200, 2)
    assert many[:KNOTS] == pytest.approx(few, rel=0.01)


def test_a_batch_of_thousands_is_predicted_too() -> None:
    uniform = Survival(np.arange(1, 1001, dtype=np.float64), 1 - np.arange(1, 1001) / 1000)
    intervals = cut_intervals(uniform, 4_000, 2_000, 4)
    assert bool(np.all(np.diff(intervals) <= 0))
    # After N > 500 tokens B * (1 - N / 1000) of the units admitted last remain, and none of those before them.
    assert intervals[[500, 1_000, 1_500]] == pytest.approx([875, 750, 625], rel=0.02)


@pytest.mark.parametrize("most", [0, 1, 63, 64, 250, 1_000, 50_000])
def test_the_knots_are_few_however_many_extra_units_there_may_be(most: int) -> None:
    extras = knots(most)
    assert (extras[0], extras[-1]) == (0, most)
    assert len(set(extras)) == len(extras) == min(most + 1, len(extras)) <= KNOTS
    assert extras == sorted(extras)
