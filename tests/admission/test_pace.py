"""What a step's time consists of, found again from steps whose parts are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oppo.admission import Observation, Scoring
from oppo.admission.forecast import Pace, ScorerPace, decode_costs, pace, scorer_paces


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
