"""What the forecast is made of: response lengths, Poisson tables, the law of the cut interval, the costs of a step."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from oppo.admission import Observation, Overcommit, Scoring
from oppo.admission.forecast import (
    KNOTS,
    Pace,
    ScorerPace,
    Survival,
    cut_intervals,
    decode_costs,
    kaplan_meier,
    knots,
    pace,
    scorer_paces,
    summed,
    tabulated,
)
from oppo.events import Prompt
from oppo.stages.ledger import Ledger


def test_without_deferred_responses_it_is_the_empirical_distribution() -> None:
    curve = kaplan_meier([4, 1, 2, 2], deferred=[])
    assert curve(np.array([0.0, 1.0, 1.9, 2.0, 3.0, 4.0])).tolist() == [1.0, 0.75, 0.75, 0.25, 0.25, 0.0]
    assert curve.mean == pytest.approx(np.mean([4, 1, 2, 2]))


def test_a_deferred_response_counts_as_longer_than_what_it_has() -> None:
    without = kaplan_meier([10, 20, 30, 40], deferred=[])
    with_it = kaplan_meier([10, 20, 30, 40], deferred=[15])
    assert with_it.mean > without.mean
    assert with_it(np.array([20.0]))[0] == pytest.approx(4 / 5 * 2 / 3)


def test_a_deferred_response_beyond_all_others_ends_the_curve() -> None:
    curve = kaplan_meier([10, 20], deferred=[50])
    assert curve.longest == 50
    assert curve(np.array([20.0, 49.0, 50.0])) == pytest.approx([1 / 3, 1 / 3, 0.0])


def test_censored_lengths_give_the_mean_of_what_is_generated() -> None:
    """Longer responses are deferred more often: their lengths so far, taken for complete, would bias the mean."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(4.0, 0.8, 20_000)
    seen = random.uniform(0, 400, len(lengths))
    finished = lengths[lengths <= seen]
    deferred = seen[lengths > seen]
    curve = kaplan_meier(finished.astype(int).tolist(), deferred.astype(int).tolist())
    assert curve.mean == pytest.approx(lengths.mean(), rel=0.03)
    assert finished.mean() < 0.85 * lengths.mean()


def exactly(count: int, mean: float) -> float:
    """Return the probability of at most ``count``, term by term, in logarithms."""
    terms = (math.exp(k * math.log(mean) - mean - math.lgamma(k + 1)) for k in range(count + 1))
    return min(1.0, math.fsum(terms))


MEANS = [0.01, 0.3, 1.0, 2.5, 8.0, 30.0, 90.0, 300.0, 700.0, 760.0, 1_000.0, 1_900.0, 2_000.0, 2_100.0, 5_000.0]


@pytest.mark.parametrize("count", [0, 1, 2, 7, 40, 300, 760, 1_000, 2_000])
def test_the_tables_agree_with_the_sum_of_all_terms_for_any_count(count: int) -> None:
    (found,) = tabulated([count])(np.array([[0.0, *MEANS]]))
    assert found == pytest.approx([1.0, *(exactly(count, mean) for mean in MEANS)], abs=1e-4)


def test_a_few_counts_are_summed() -> None:
    found = summed(np.array([MEANS] * 8))
    for count, row in enumerate(found):
        assert row == pytest.approx([exactly(count, mean) for mean in MEANS], abs=1e-12)


def test_the_tables_are_rows_of_their_own() -> None:
    both = tabulated([3, 900])(np.array([[2.0, 4.0], [880.0, 930.0]]))
    assert both[0] == pytest.approx([exactly(3, 2.0), exactly(3, 4.0)], abs=1e-4)
    assert both[1] == pytest.approx([exactly(900, 880.0), exactly(900, 930.0)], abs=1e-4)


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
    curve = kaplan_meier(lengths.tolist(), deferred=[])
    predicted = cut_intervals(curve, 48, extra, max_deferrals)[extra]
    measured = simulated(lengths, Overcommit(48, extra, max_deferrals), steps=160)
    # A bound of 1 makes long and short steps alternate, which a law of means does not see.
    assert predicted == pytest.approx(measured, rel=0.12 if max_deferrals == 1 else 0.08)


def test_without_extra_units_it_is_the_expected_longest_of_a_batch() -> None:
    uniform = Survival(np.arange(1, 1001, dtype=np.float64), 1 - np.arange(1, 1001) / 1000)
    (longest,) = cut_intervals(uniform, 50, most=0, max_deferrals=2)
    assert longest == pytest.approx(1000 * 50 / 51, rel=0.01)


def test_more_extra_units_never_make_it_longer() -> None:
    curve = kaplan_meier(lognormal(900, 0.8, 4_000).tolist(), deferred=[])
    assert bool(np.all(np.diff(cut_intervals(curve, 112, 28, 2)) <= 0))


def test_while_more_are_at_the_cap_than_may_be_deferred_nothing_is_gained() -> None:
    lengths = np.where(np.arange(1_000) % 8 == 0, 2_000, lognormal(1_000, 0.5, 2_000))  # an eighth at the cap
    intervals = cut_intervals(kaplan_meier(lengths.tolist(), deferred=[]), 112, 28, 2)
    assert intervals[:7] == pytest.approx(np.full(7, 2_000), rel=0.03)
    assert intervals[28] < 0.75 * 2_000


@pytest.mark.parametrize("sigma", [0.4, 0.9])
def test_many_extra_units_are_predicted_as_few_are(sigma: float) -> None:
    curve = kaplan_meier(lognormal(3_000, sigma, 2_000).tolist(), deferred=[])
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


def seen(decode_steps: int, tokens: int, *scoring: Scoring, decode: float = 10.0, rest: float = 1.0) -> Observation:
    return Observation(
        0, decode_steps=decode_steps, tokens=tokens, decode_seconds=decode, scoring=scoring, rest_seconds=rest
    )


def test_the_costs_of_steps_and_of_tokens_are_told_apart() -> None:
    random = np.random.default_rng(0)
    window = [
        seen(steps, tokens, decode=0.02 * steps + 0.01 * tokens / 64)
        for steps, tokens in zip(
            random.integers(300, 900, 8).tolist(), random.integers(9_000, 14_000, 8).tolist(), strict=True
        )
    ]
    assert decode_costs(window, batch=64) == pytest.approx((0.02, 0.01), rel=0.05)


def test_like_steps_leave_the_prior_as_it_is_and_the_sum_as_measured() -> None:
    window = [seen(500, 6_400, decode=10.0)] * 4
    step, token = decode_costs(window, batch=64)
    assert step * 500 + token * 100 == pytest.approx(10.0, rel=0.001)
    assert step * 500 == pytest.approx(8.0, rel=0.05)


def test_tokens_are_no_harder_to_learn_of_than_steps() -> None:
    """Though there are so few of them for each unit: the prior is of parts, whatever the numbers are."""
    random = np.random.default_rng(1)
    steps = random.integers(180, 360, 8)
    tokens = 24 * (steps // 9 + random.integers(20, 50, 8))  # long steps have many tokens
    window = [
        seen(int(n), int(total), decode=0.0056 * n + 0.00075 * total) for n, total in zip(steps, tokens, strict=True)
    ]
    step, token = decode_costs(window, batch=24)
    assert step == pytest.approx(0.0056, rel=0.05)
    assert token == pytest.approx(24 * 0.00075, rel=0.05)


def test_the_noisier_the_points_the_more_counts_the_prior() -> None:
    random = np.random.default_rng(2)
    steps, tokens = random.integers(300, 700, 8), random.integers(3_000, 9_000, 8)
    by_tokens = 0.001 * tokens  # nothing is paid for a step

    def part_of_steps(noise: float) -> float:
        seconds = by_tokens * np.exp(noise * np.linspace(-1, 1, 8) * (-1.0) ** np.arange(8))
        window = [
            seen(*each[:2], decode=each[2]) for each in zip(steps.tolist(), tokens.tolist(), seconds, strict=True)
        ]
        step, _ = decode_costs(window, batch=10)
        return float(step * steps.mean() / seconds.mean())

    assert part_of_steps(0.0) == pytest.approx(0.0, abs=0.03)
    assert 0.03 < part_of_steps(0.6) < 0.9


def test_neither_cost_is_negative() -> None:
    falling = [seen(100, 2_000, decode=1.0), seen(100, 1_000, decode=2.0), seen(100, 500, decode=3.0)]
    assert decode_costs(falling, batch=10) == pytest.approx((0.02, 0.0))
    rising = [seen(300, 1_000, decode=0.5), seen(200, 2_000, decode=2.0), seen(100, 3_000, decode=3.5)]
    assert decode_costs(rising, batch=10) == pytest.approx((0.0, 0.01))


def test_a_scorer_that_waits_for_the_cut_has_a_tail_that_stays() -> None:
    assert scorer_paces([seen(9, 9, Scoring("ref_logp", 0.0, 3.0))]) == (ScorerPace(3.0, 3.0),)


def test_a_scorer_that_is_busy_all_along_has_a_floor_and_no_tail() -> None:
    (reward,) = scorer_paces([seen(9, 9, Scoring("reward", 10.0, 25.0))])
    assert reward == ScorerPace(35.0, 0.0)


def test_a_step_is_as_long_as_its_slowest_scorer() -> None:
    parts = Pace(step=0.01, token=0.0, scorers=(ScorerPace(4.0, 0.5), ScorerPace(2.0, 2.0)), rest=1.0)
    decode_steps = np.array([1_000.0, 300.0, 100.0])
    assert parts.seconds(decode_steps, mean_length=50.0) == pytest.approx([10 + 2 + 1, 3 + 2 + 1, 4 + 1])


def test_without_scorers_there_is_decoding_and_the_rest() -> None:
    parts = pace([seen(500, 640, decode=10.0, rest=3.0)] * 3, batch=64)
    assert parts.scorers == ()
    assert parts.seconds(np.array([500.0]), 10.0) == pytest.approx([13.0], rel=0.01)


def test_steps_in_flight_take_the_longest_of_their_phases_or_their_share_of_all() -> None:
    alone = Pace(step=0.01, token=0.0, scorers=(ScorerPace(busy=2.0, tail=1.0), ScorerPace(3.5, 0.5)), rest=3.0)
    steps = np.array([100.0, 300.0, 500.0])
    assert alone.seconds(steps, 1.0).tolist() == [6.5, 7.0, 9.0]
    assert replace(alone, lookahead=1).seconds(steps, 1.0).tolist() == [3.5, 3.5, 5.0]
    assert replace(alone, lookahead=1, rest=6.0).seconds(steps, 1.0).tolist() == [6.0, 6.0, 6.0]
    assert replace(alone, lookahead=1, scorers=()).seconds(steps, 1.0).tolist() == [3.0, 3.0, 5.0]
    chained = replace(alone, scorers=(ScorerPace(busy=2.5, tail=2.5),))
    assert replace(chained, lookahead=1).seconds(steps, 1.0).tolist() == [3.25, 4.25, 5.25]
    assert replace(chained, lookahead=2).seconds(steps, 1.0).tolist() == [3.0, 3.0, 5.0]
