"""Scores to rewards to advantages: torchrl's and TRL's values, each step by hand, and the edges that neither has."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import assume, given, strategies as st
from hypothesis.extra import numpy as hnp
from numpy.testing import assert_allclose
from torch import Tensor

from oppo.events import BoolArray, FloatArray
from oppo.losses import ClippedLoss, Input, Inputs, Whole, importance_weights
from oppo.returns import (
    GROUP_EPSILON,
    SEQUENCE_BAND,
    TOKEN_BAND,
    AdaptiveKL,
    GroupAdvantage,
    ImportanceCorrection,
    KLEstimator,
    Level,
    RatioBase,
    RunningMoments,
    ScoreShaping,
    TokenWeight,
    gae,
    group_advantages,
    kl_estimate,
    returns_to_go,
    shaped_rewards,
    whiten,
)

GOLDEN = json.loads((Path(__file__).parent / "golden" / "ppo.json").read_text(encoding="utf-8"))
SETTING = {"gamma": 0.99, "lam": 0.9, "kl": 0.1}
"""Of the golden update; see tests/golden/fixed.py."""


def floats(values: object) -> FloatArray:
    return np.asarray(values, np.float32)


def close(ours: object, theirs: object) -> None:
    np.testing.assert_allclose(floats(ours), floats(theirs), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", GOLDEN["gae"], ids=lambda case: f"{len(case['values'])}-tokens-lam-{case['lam']}")
def test_gae_equals_torchrl(case: dict[str, float]) -> None:
    advantages, returns = gae(floats(case["rewards"]), floats(case["values"]), case["gamma"], case["lam"])
    close(advantages, floats(case["advantages"]))
    close(returns, floats(case["returns"]))
    assert advantages.dtype == returns.dtype == np.float32


def test_rewards_advantages_and_returns_equal_those_of_a_trl_update_whose_responses_reach_the_cap() -> None:
    golden = GOLDEN["update"]
    rows = range(len(golden["scores"]))
    kl = [kl_estimate(floats(golden["logprobs"][r]), floats(golden["ref_logprobs"][r])) for r in rows]
    rewards = [shaped_rewards(golden["scores"][r], kl[r], SETTING["kl"]) for r in rows]
    estimates = [gae(rewards[r], floats(golden["values"][r]), SETTING["gamma"], SETTING["lam"]) for r in rows]
    advantages = np.concatenate([advantage for advantage, _ in estimates])
    close(kl, floats(golden["kl"]))
    close(rewards, floats(golden["rewards"]))
    close(advantages, floats(golden["advantages"]).ravel())
    close([returns for _, returns in estimates], floats(golden["returns"]))
    whitened = whiten(advantages, np.ones(len(advantages), np.bool_))
    close(whitened, floats(golden["whitened"]).ravel())


def test_where_a_response_ends_early_trl_has_one_slot_more() -> None:
    """There the score and a value lie one slot past EOS, where no token is; here they lie on EOS, which ended it."""
    golden, cap = GOLDEN["early"], len(GOLDEN["early"]["rewards"][0])
    for r, score in enumerate(golden["scores"]):
        n = golden["padding_mask"][r].count(False)
        penalty = -np.float32(SETTING["kl"]) * floats(golden["kl"][r][:n])
        ours, values = shaped_rewards(score, floats(golden["kl"][r][:n]), SETTING["kl"]), floats(golden["values"][r])
        advantages, _ = gae(ours, values[:n], SETTING["gamma"], SETTING["lam"])
        theirs = np.append(penalty, np.float32(score)) if n < cap else ours
        close(golden["rewards"][r], np.append(theirs, np.zeros(cap - len(theirs))))
        close(golden["advantages"][r][:n], gae(theirs, values[: len(theirs)], SETTING["gamma"], SETTING["lam"])[0][:n])
        close(ours[:-1], penalty[:-1])
        close(ours[-1], penalty[-1] + score)
        assert np.allclose(advantages, golden["advantages"][r][:n], atol=1e-5) is (n == cap)


@pytest.mark.parametrize("case", GOLDEN["kl"], ids=lambda case: str(case["estimator"]))
def test_kl_equals_trl(case: dict[str, str]) -> None:
    estimator: KLEstimator = "k1" if case["estimator"] == "k1" else "k3"
    kl = kl_estimate(floats(case["logprobs"]), floats(case["reference"]), estimator)
    close(kl, floats(case["kl"]))


@pytest.mark.parametrize("case", GOLDEN["whiten"], ids=lambda case: f"shift-mean-{case['shift_mean']}")
def test_whitening_equals_trl_where_the_mask_is_true(case: dict[str, bool]) -> None:
    mask = np.asarray(case["mask"], np.bool_)
    whitened = whiten(floats(case["x"]), mask, shift_mean=case["shift_mean"])
    close(whitened[mask], floats(case["whitened"])[mask])
    assert not whitened[~mask].any()


@given(hnp.arrays(np.float32, st.integers(0, 30), elements=st.floats(-5, 5, width=32)), st.floats(0, 1))
def test_the_return_of_a_token_is_the_discounted_sum_of_the_rewards_from_it_on(
    rewards: FloatArray, gamma: float
) -> None:
    expected = [sum(gamma**k * float(reward) for k, reward in enumerate(rewards[t:])) for t in range(len(rewards))]
    returns = returns_to_go(rewards, gamma)
    np.testing.assert_allclose(returns, floats(expected), rtol=1e-4, atol=1e-4)
    assert returns.dtype == np.float32


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: shaped_rewards(1.0, floats([0, 0]), 0.1, np.zeros(2, np.bool_)), "none of the 2 tokens of the"),
        (
            lambda: gae(floats([0, 0]), floats([0, 0, 0]), 1.0, 1.0),
            r"one length, got .*rewards.*\(2,\).*values.*\(3,\)",
        ),
        (lambda: kl_estimate(floats([0]), floats([0]), "k4"), "must be 'k1', 'k2' or 'k3', not 'k4'"),  # type: ignore[arg-type]
        (lambda: group_advantages(floats([]), "centred"), "needs two of them, not 0"),
        (lambda: group_advantages(floats([1]), "centred"), "needs two of them, not 1"),
        (lambda: group_advantages(floats([0, 1]), "median"), "must be 'leave_one_out', .*, not 'median'"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_value_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_the_score_lands_on_the_last_sampled_token_and_given_tokens_earn_nothing() -> None:
    sampled = np.array([True, True, False, True, False])
    rewards = shaped_rewards(2.0, floats([1, 2, 3, 4, 5]), 0.5, sampled)
    assert rewards.tolist() == [-0.5, -1.0, 0.0, 0.0, 0.0]
    assert rewards.dtype == np.float32


@pytest.mark.parametrize("counted", [0, 1])
def test_whitening_fewer_than_two_tokens_gives_zeros(counted: int) -> None:
    mask = np.arange(3) < counted
    assert whiten(floats([3, 4, 5]), mask).tolist() == [0, 0, 0]


@pytest.mark.parametrize(("kl", "factor"), [(6.0, 1.0), (60.0, 1.02), (0.0, 0.98), (6.6, 1.01), (float("nan"), 1.0)])
def test_the_adaptive_coefficient_follows_the_clipped_relative_error(kl: float, factor: float) -> None:
    before = AdaptiveKL(0.5, target=6.0, horizon=640)
    assert before.after(kl, 64).coefficient == pytest.approx(0.5 * factor)
    assert before.coefficient == 0.5


@pytest.mark.parametrize("horizon", [1, 12.8, 14, 640])
def test_the_adaptive_coefficient_never_reaches_zero_and_comes_back(horizon: float) -> None:
    control = AdaptiveKL(0.5, target=6.0, horizon=horizon)
    small = control.after(0.0, 64)
    assert small.coefficient == pytest.approx(0.5 * max(0.1, 1 - 0.2 * 64 / horizon))
    assert small.after(60.0, 64).coefficient > small.coefficient
    for _ in range(2000):
        small = small.after(0.0, 64)
    assert 0 < small.after(0.0, 64).coefficient < small.after(60.0, 64).coefficient


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [
        ("leave_one_out", [1 - 20 / 3, 2 - 19 / 3, 8 - 13 / 3, 10 - 11 / 3]),
        ("centred", [-4.25, -3.25, 2.75, 4.75]),
        ("standardised", [-4.25 / 4.425406, -3.25 / 4.425406, 2.75 / 4.425406, 4.75 / 4.425406]),
        ("batch_standardised", [-4.25 / 2.0001, -3.25 / 2.0001, 2.75 / 2.0001, 4.75 / 2.0001]),
        ("max_rl", [-4.25 / 5.25, -3.25 / 5.25, 2.75 / 5.25, 4.75 / 5.25]),
    ],
)
def test_the_advantages_in_a_group_are_those_computed_by_hand(estimator: GroupAdvantage, expected: list[float]) -> None:
    advantages = group_advantages(floats([1, 2, 8, 10]), estimator, 2.0)
    np.testing.assert_allclose(advantages, floats(expected), rtol=1e-6)
    assert advantages.dtype == np.float32


GROUPS = hnp.arrays(np.float32, st.integers(2, 16), elements=st.floats(-10, 10, width=32))
ESTIMATORS = st.sampled_from(["leave_one_out", "standardised", "centred"])


@given(GROUPS, ESTIMATORS, st.floats(-5, 5), st.randoms(use_true_random=False))
def test_in_a_group_only_differences_count_and_they_cancel(
    scores: FloatArray, estimator: GroupAdvantage, shift: float, random: Random
) -> None:
    advantages = group_advantages(scores, estimator)
    assert abs(float(advantages.sum(dtype=np.float64))) < 1e-5 * (1 + float(np.abs(advantages).sum()))
    order = random.sample(range(len(scores)), len(scores))
    np.testing.assert_allclose(group_advantages(scores[order], estimator), advantages[order], rtol=1e-5, atol=1e-6)
    if estimator != "standardised":
        np.testing.assert_allclose(
            group_advantages(scores + np.float32(shift), estimator), advantages, rtol=1e-4, atol=1e-5
        )


@given(GROUPS)
def test_a_standardised_group_has_the_deviation_that_its_epsilon_leaves(scores: FloatArray) -> None:
    deviation = float(scores.std(ddof=1, dtype=np.float64))
    standardised = group_advantages(scores, "standardised")
    assert float(standardised.std(ddof=1, dtype=np.float64)) == pytest.approx(
        deviation / (deviation + GROUP_EPSILON), abs=1e-5
    )


def test_a_mean_of_scores_that_is_not_positive_divides_nothing() -> None:
    for scores in ([0, 0, 0], [-1, 0, 1], [-3, 0, 1]):
        assert group_advantages(floats(scores), "max_rl").tolist() == [0, 0, 0]
    np.testing.assert_allclose(group_advantages(floats([0, 0, 0, 1]), "max_rl"), [-1, -1, -1, 3])


@pytest.mark.parametrize("estimator", get_args(GroupAdvantage))
def test_scores_that_are_alike_teach_nothing(estimator: GroupAdvantage) -> None:
    assert group_advantages(floats([0.1] * 7), estimator).tolist() == [0] * 7


STOPPED: BoolArray = np.array([True, True, False])
LENGTHS = np.array([2, 6, 9])


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=5), min_size=1, max_size=6))
def test_moments_of_batches_are_those_of_all_scores_at_once(batches: list[list[float]]) -> None:
    moments, every = RunningMoments(), floats([score for batch in batches for score in batch]).astype(np.float64)
    for batch in batches:
        moments = moments.after(floats(batch))
    assert moments.count == len(every)
    if len(every) > 1:
        assert moments.mean == pytest.approx(every.mean(), rel=1e-9, abs=1e-9)
        assert moments.squares == pytest.approx(((every - every.mean()) ** 2).sum(), rel=1e-9, abs=1e-6)


def test_the_defaults_change_no_bit_and_keep_no_state() -> None:
    scores = floats([0.1, -3.7, 1e30])
    shaping = ScoreShaping().after(scores)
    assert shaping == ScoreShaping()
    assert np.array_equal(shaping.shaped(scores, STOPPED, LENGTHS), scores)


def test_a_response_that_did_not_stop_pays_and_the_others_do_not() -> None:
    shaped = ScoreShaping(missing_eos_penalty=1.5).shaped(floats([1, 2, 3]), STOPPED, LENGTHS)
    assert shaped.tolist() == [1.0, 2.0, 1.5]


def test_scores_are_normalised_then_clipped_then_scaled_then_penalised() -> None:
    shaping = ScoreShaping(norm=True, clip=1.0, scale=10.0, missing_eos_penalty=0.5)
    shaping = shaping.after(floats([0, 4])).after(floats([2, 2, 12]))
    assert (shaping.moments.count, shaping.moments.mean) == (5, 4.0)
    std = float(np.std([0, 4, 2, 2, 12], ddof=1))
    assert shaping.moments.std == pytest.approx(std)
    expected = [10 * (2 - 4) / std, 10 * (2 - 4) / std, 10 * 1.0 - 0.5]
    assert shaping.shaped(floats([2, 2, 12]), STOPPED, LENGTHS).tolist() == pytest.approx(expected)


def test_a_long_response_pays_more_the_nearer_it_comes_to_the_cap() -> None:
    shaping = ScoreShaping(scale=10.0, long_from=4, long_to=8, long_penalty=2.0)
    assert shaping.shaped(floats([1, 1, 1]), STOPPED, LENGTHS).tolist() == [10.0, 9.0, 8.0]
    assert ScoreShaping(long_from=4, long_to=4).shaped(floats([1, 1, 1]), STOPPED, LENGTHS).tolist() == [1, 1, 1]


BASES: tuple[RatioBase, ...] = ("behaviour", "proximal")
WEIGHTS: tuple[TokenWeight, ...] = ("none", "truncated", "mask")
LEVELS: tuple[Level, ...] = ("token", "sequence", "product")
EVERY = [
    ImportanceCorrection(ratio_base=base, weight=weight, level=level, k3=k3)
    for base, weight, level, k3 in product(BASES, WEIGHTS, LEVELS, (None, 0.01))
]
MISMATCH = np.array([1.0, 0.25, 4.0, 10.0], np.float64)
"""Of one rollout of four tokens."""
BEHAVIOUR = np.array([-1.0, -3.0, -2.0, -5.0], np.float32)
PROXIMAL = (BEHAVIOUR + np.log(MISMATCH)).astype(np.float32)
ALL = np.ones(4, np.bool_)


def weights(correction: ImportanceCorrection, lengths: tuple[int, ...] = (4,)) -> FloatArray:
    return weighed(correction, BEHAVIOUR, PROXIMAL, ALL, lengths)


def weighed(
    correction: ImportanceCorrection,
    behaviour: FloatArray,
    proximal: FloatArray,
    sampled: BoolArray,
    lengths: Sequence[int],
    *,
    of_rows: bool = False,
) -> FloatArray:
    """Return the weights of the tokens of rollouts end to end."""
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    given: dict[Input, Tensor] = {"behaviour": torch.from_numpy(behaviour), "proximal": torch.from_numpy(proximal)}
    inputs = Inputs(torch.from_numpy(sampled), rows, torch.arange(len(lengths)), Whole(4, len(lengths), 1, 4), given)
    return importance_weights(correction, inputs, of_rows=of_rows).numpy()


def test_the_ratio_is_over_what_was_chosen() -> None:
    assert {"behaviour", "proximal"} & ClippedLoss().reads == {"behaviour"}
    decoupled = ClippedLoss(correction=ImportanceCorrection(ratio_base="proximal"))
    assert {"behaviour", "proximal"} & decoupled.reads == {"proximal"}


@pytest.mark.parametrize(("weight", "proximal"), [("truncated", [1.0, 0.25, 2.0, 2.0]), ("mask", [1.0, 0.0, 4.0, 0.0])])
def test_tokens_weigh_what_the_table_says(weight: TokenWeight, proximal: list[float]) -> None:
    assert_allclose(weights(ImportanceCorrection(weight=weight, ratio_base="proximal")), proximal, rtol=1e-6)
    assert_allclose(weights(ImportanceCorrection(weight=weight)), proximal / MISMATCH, rtol=1e-6)


def test_a_rollouts_weight_is_that_of_its_geometric_mean() -> None:
    means = [math.sqrt(0.25), math.sqrt(40.0)]
    by_rollout = ImportanceCorrection(weight="truncated", level="sequence", ratio_base="proximal", cap=3.0)
    assert_allclose(weights(by_rollout, (2, 2)), [means[0], means[0], 3.0, 3.0], rtol=1e-6)
    kept = ImportanceCorrection(weight="mask", level="sequence", low=0.4, high=2.0)
    assert weights(kept, (2, 2)).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("base", BASES)
def test_a_product_is_truncated_once_for_the_whole_rollout(base: RatioBase) -> None:
    """As plain float64 code has it: ratio times weight is min(product, c) times the ratio over the proximal policy."""
    cap = 3.0
    correction = ImportanceCorrection(weight="truncated", level="product", ratio_base=base, cap=cap)
    products = [1.0 * 0.25, 1.0 * 0.25, 4.0 * 10.0, 4.0 * 10.0]
    expected = [
        min(each, cap) / (mismatch if base == "behaviour" else 1.0)
        for each, mismatch in zip(products, MISMATCH.tolist(), strict=True)
    ]
    assert_allclose(weights(correction, (2, 2)), expected, rtol=1e-6)


@st.composite
def mismatched(draw: st.DrawFn) -> tuple[list[int], list[float], list[bool]]:
    """Return the lengths of rollouts, and the log mismatch of each token and whether it was sampled."""
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    total = sum(lengths)
    logs = draw(st.lists(st.floats(-1.5, 1.5, width=32), min_size=total, max_size=total))
    return lengths, logs, draw(st.lists(st.booleans(), min_size=total, max_size=total))


@given(mismatched(), st.sampled_from(BASES), st.just(0.0) | st.floats(1e-6, 1.0), st.floats(1.0, 8.0), st.booleans())
def test_a_product_outside_its_band_masks_the_whole_rollout(
    tokens: tuple[list[int], list[float], list[bool]], base: RatioBase, low: float, high: float, of_rows: bool
) -> None:
    lengths, logs, sampled = tokens
    behaviour, proximal = np.zeros(len(logs), np.float32), np.array(logs, np.float32)
    expected = list[float]()
    for end, length in zip(np.cumsum(lengths).tolist(), lengths, strict=True):
        here = slice(end - length, end)
        mismatches = np.where(sampled[here], np.exp(np.float64(proximal[here])), 1.0)
        of_rollout = mismatches.prod()
        assume(all(abs(of_rollout / bound - 1) > 1e-9 for bound in (low, high) if bound))
        ratio = np.full(length, of_rollout ** (1 / max(sum(sampled[here]), 1))) if of_rows else mismatches
        kept = of_rollout if low <= of_rollout <= high else 0.0
        expected += (kept / (ratio if base == "behaviour" else np.ones(length))).tolist()
    correction = ImportanceCorrection(weight="mask", level="product", ratio_base=base, low=low, high=high)
    assert_allclose(
        weighed(correction, behaviour, proximal, np.array(sampled), lengths, of_rows=of_rows), expected, rtol=1e-5
    )


@pytest.mark.parametrize(("weight", "level"), [("none", "token"), ("truncated", "token"), ("truncated", "product")])
def test_a_rollout_whose_mean_k3_is_larger_is_masked_and_no_other_changes(weight: TokenWeight, level: Level) -> None:
    k3 = [mismatch - 1.0 - math.log(mismatch) for mismatch in MISMATCH.tolist()]
    means = [(k3[0] + k3[1]) / 2, (k3[2] + k3[3]) / 2]
    assert means[0] < 0.5 < means[1]
    for base in BASES:
        plain = ImportanceCorrection(weight=weight, level=level, ratio_base=base)
        kept = weights(replace(plain, k3=0.5), (2, 2))
        assert kept.tolist() == [*weights(plain, (2, 2)).tolist()[:2], 0.0, 0.0]
        assert weights(replace(plain, k3=means[1] * 1.001), (2, 2)).tolist() == weights(plain, (2, 2)).tolist()
        assert weighed(replace(plain, k3=0.5), BEHAVIOUR, BEHAVIOUR + np.float32(1_000), ALL, [4]).tolist() == [0.0] * 4


def test_a_k3_needs_proximal_log_probs_and_whole_rows() -> None:
    loss = ClippedLoss(correction=ImportanceCorrection(k3=0.01))
    assert loss.correction.needs_proximal
    assert loss.reads >= {"behaviour", "proximal"}
    assert loss.unit == "row"


def test_tokens_nobody_sampled_are_no_part_of_a_rollouts_mean() -> None:
    kept = ImportanceCorrection(weight="mask", level="sequence")
    sampled = np.array([True, False, False, False])
    assert weighed(kept, BEHAVIOUR, PROXIMAL, sampled, [4]).tolist() == [1, 1, 1, 1]
    assert weighed(kept, BEHAVIOUR, PROXIMAL, ~ALL, [4]).tolist() == [1, 1, 1, 1]


def test_a_mask_without_a_band_of_its_own_has_that_of_its_level() -> None:
    assert ImportanceCorrection(weight="mask").band == TOKEN_BAND
    assert ImportanceCorrection(weight="mask", level="sequence", high=2.0).band == (SEQUENCE_BAND[0], 2.0)


def test_a_mismatch_too_large_for_a_float_is_truncated_and_masked_all_the_same() -> None:
    far = BEHAVIOUR + np.float32(1_000)
    for base in BASES:
        truncated = weighed(ImportanceCorrection(weight="truncated", ratio_base=base), BEHAVIOUR, far, ALL, [4])
        assert truncated.tolist() == [2.0 if base == "proximal" else 0.0] * 4
        assert not weighed(ImportanceCorrection(weight="mask", ratio_base=base), BEHAVIOUR, far, ALL, [4]).any()
