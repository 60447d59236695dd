"""What scores of held-out responses come to."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import mean, stdev

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo.evaluation import Answers, compare, half_width, pass_at_k
from oppo.evaluation.evaluate import of_greedy, of_sampled
from oppo.events import Drop, Finish, Prompt, Response
from oppo.stages import ScoredRollout


@given(st.lists(st.booleans(), min_size=1, max_size=9), st.integers(1, 9))
def test_pass_at_k_is_the_share_of_choices_of_k_that_hold_one_that_passed(passed: list[bool], k: int) -> None:
    if k > len(passed):
        with pytest.raises(ValueError, match="expected 1 <= k <= count"):
            pass_at_k(len(passed), sum(passed), k)
        return
    choices = list(combinations(passed, k))
    assert pass_at_k(len(passed), sum(passed), k) == pytest.approx(sum(map(any, choices)) / len(choices), abs=1e-12)


def test_pass_at_k_is_unbiased_where_the_plug_in_estimate_is_not() -> None:
    """1 - (1 - c/n)^k is too low (Chen et al. 2021, appendix A): here by much."""
    chance, n, k = 0.2, 8, 4
    true = 1 - (1 - chance) ** k
    weights = [math.comb(n, c) * chance**c * (1 - chance) ** (n - c) for c in range(n + 1)]
    ours = sum(weight * pass_at_k(n, c, k) for c, weight in enumerate(weights))
    plugged_in = sum(weight * (1 - (1 - c / n) ** k) for c, weight in enumerate(weights))
    assert ours == pytest.approx(true, abs=1e-12)
    assert plugged_in < true - 0.02


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=20))
def test_the_interval_is_that_of_the_mean_over_prompts(values: list[float]) -> None:
    assert half_width(values) == pytest.approx(1.96 * stdev(values) / math.sqrt(len(values)), abs=1e-9)


def test_one_prompt_has_no_interval() -> None:
    assert math.isnan(half_width([1.0]))
    assert "eval/score_ci95" not in of_greedy(answers([[0.5]]), None)


def answers(groups: list[list[float]], *, length: int = 3, dropped: int = 0) -> Answers:
    """Return responses with these scores, to a prompt each group."""
    rollouts = []
    for group, scores in enumerate(groups):
        for sample, score in enumerate(scores):
            number = 10 * group + sample
            tokens = np.arange(length + group, dtype=np.int32)
            prompt = Prompt(number, group, np.array([1], np.int32), sample, group)
            zeros = np.zeros(len(tokens), np.float32)
            response = Response(prompt, tokens, zeros, tokens * 0, np.ones(len(tokens), np.bool_))
            rollouts.append(ScoredRollout(Finish(number, response, "length" if group else "eos"), None, score))
    return Answers(rollouts, tuple(Drop(99, "no") for _ in range(dropped)), {"reward/short_mean": [1.0, 0.0]})


def test_the_most_likely_responses_have_a_mean_an_interval_and_a_share_that_passed() -> None:
    metrics = of_greedy(answers([[1.0], [0.0], [1.0], [0.5]], dropped=2), 1.0)
    assert metrics == {
        "eval/dropped": 2,
        "eval/score": 0.625,
        "eval/score_ci95": pytest.approx(1.96 * stdev([1, 0, 1, 0.5]) / 2),
        "eval/response_length": mean([3, 4, 5, 6]),
        "eval/capped": 0.75,
        "eval/passed": 0.5,
        "eval/reward/short_mean": 0.5,
    }
    assert "eval/passed" not in of_greedy(answers([[1.0]]), None)
    assert of_greedy(Answers((), (Drop(1, "no"),)), 1.0) == {"eval/dropped": 1}


def test_drawn_responses_have_the_mean_over_prompts_and_pass_at_every_power_of_two() -> None:
    groups = [[1.0, 0.0, 0.0, 0.0, 1.0], [0.0] * 5, [1.0, 1.0]]
    metrics = of_sampled(answers(groups), 5, 1.0)
    assert metrics["eval/sampled_score"] == pytest.approx((0.4 + 0 + 1) / 3), "each prompt counts the same"
    assert metrics["eval/sampled_score_ci95"] == pytest.approx(1.96 * stdev([0.4, 0, 1]) / math.sqrt(3))
    assert metrics["eval/pass_at_1"] == pytest.approx((0.4 + 0 + 1) / 3)
    assert metrics["eval/pass_at_2"] == pytest.approx((1 - 3 / 10 + 0 + 1) / 3)
    assert metrics["eval/pass_at_4"] == pytest.approx((1 + 0) / 2), "of prompts with four responses left"
    assert metrics["eval/pass_at_5"] == pytest.approx((1 + 0) / 2)
    assert {name for name in metrics if "pass" in name} == {f"eval/pass_at_{k}" for k in (1, 2, 4, 5)}
    assert "eval/pass_at_1" not in of_sampled(answers(groups), 5, None)


def test_paired_scores_are_compared() -> None:
    before, after = np.array([0, 1, 2], np.float32), np.array([1, 1, 5], np.float32)
    found = compare(before, after)
    assert (found.before, found.spread) == (1, 1)
    assert found.gain == pytest.approx(4 / 3)
    assert found.half_width == pytest.approx(1.96 * stdev([1, 0, 3]) / math.sqrt(3))
    with pytest.raises(ValueError, match="two score arrays of one length"):
        compare(before[:1], after[:1])
