"""What stale tokens weigh: the table of the module's docstring, and that current tokens weigh 1 whatever is chosen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from torch import Tensor

from oppo.events import BoolArray, FloatArray
from oppo.losses import ClippedLoss, Input, Inputs, Whole, importance_weights
from oppo.returns import SEQUENCE_BAND, TOKEN_BAND, Correction, Level, RatioBase, TokenWeight

BASES: tuple[RatioBase, ...] = ("behaviour", "proximal")
WEIGHTS: tuple[TokenWeight, ...] = ("none", "truncated", "mask")
LEVELS: tuple[Level, ...] = ("token", "sequence", "product")
EVERY = [
    Correction(ratio_base=base, weight=weight, level=level, k3=k3)
    for base, weight, level, k3 in product(BASES, WEIGHTS, LEVELS, (None, 0.01))
    if (weight, level) != ("mask", "product")
]

MISMATCH = np.array([1.0, 0.25, 4.0, 10.0], np.float64)
"""Of one rollout of four tokens."""
BEHAVIOUR = np.array([-1.0, -3.0, -2.0, -5.0], np.float32)
PROXIMAL = (BEHAVIOUR + np.log(MISMATCH)).astype(np.float32)
ALL = np.ones(4, np.bool_)


def weights(correction: Correction, lengths: tuple[int, ...] = (4,)) -> FloatArray:
    return weighed(correction, BEHAVIOUR, PROXIMAL, ALL, lengths)


def weighed(
    correction: Correction, behaviour: FloatArray, proximal: FloatArray, sampled: BoolArray, lengths: Sequence[int]
) -> FloatArray:
    """Return the weights of the tokens of rollouts end to end."""
    rows = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    given: dict[Input, Tensor] = {"behaviour": torch.from_numpy(behaviour), "proximal": torch.from_numpy(proximal)}
    inputs = Inputs(torch.from_numpy(sampled), rows, torch.arange(len(lengths)), Whole(4, len(lengths), 1, 4), given)
    return importance_weights(correction, inputs).numpy()


@pytest.mark.parametrize("correction", EVERY, ids=str)
def test_tokens_of_the_current_version_weigh_one(correction: Correction) -> None:
    assert weighed(correction, BEHAVIOUR, BEHAVIOUR, ALL, [1, 3]).tolist() == [1, 1, 1, 1]


def test_the_ratio_is_over_what_was_chosen() -> None:
    assert {"behaviour", "proximal"} & ClippedLoss().reads == {"behaviour"}
    decoupled = ClippedLoss(correction=Correction(ratio_base="proximal"))
    assert {"behaviour", "proximal"} & decoupled.reads == {"proximal"}


@pytest.mark.parametrize(
    ("weight", "proximal"),
    [("truncated", [1.0, 0.25, 2.0, 2.0]), ("mask", [1.0, 0.0, 4.0, 0.0])],
)
def test_tokens_weigh_what_the_table_says(weight: TokenWeight, proximal: list[float]) -> None:
    assert_allclose(weights(Correction(weight=weight, ratio_base="proximal")), proximal, rtol=1e-6)
    assert_allclose(weights(Correction(weight=weight)), proximal / MISMATCH, rtol=1e-6)


def test_without_a_weight_every_token_weighs_one() -> None:
    for base in BASES:
        assert weights(Correction(ratio_base=base)).tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("weight", ["truncated", "mask"])
def test_a_tokens_ratio_times_its_weight_does_not_depend_on_the_base_of_the_ratio(weight: TokenWeight) -> None:
    current = np.array([-1.1, -2.0, -2.5, -4.0])
    one, other = (
        np.exp(current - (BEHAVIOUR if chosen.ratio_base == "behaviour" else PROXIMAL)) * weights(chosen)
        for chosen in (Correction(weight=weight, ratio_base=base) for base in BASES)
    )
    assert_allclose(one, other, rtol=1e-5)


def test_a_rollouts_weight_is_that_of_its_geometric_mean() -> None:
    means = [math.sqrt(0.25), math.sqrt(40.0)]
    by_rollout = Correction(weight="truncated", level="sequence", ratio_base="proximal", cap=3.0)
    assert_allclose(weights(by_rollout, (2, 2)), [means[0], means[0], 3.0, 3.0], rtol=1e-6)
    kept = Correction(weight="mask", level="sequence", low=0.4, high=2.0)
    assert weights(kept, (2, 2)).tolist() == [1, 1, 0, 0]


@pytest.mark.parametrize("base", BASES)
def test_a_product_is_truncated_once_for_the_whole_rollout(base: RatioBase) -> None:
    """As plain float64 code has it: ratio times weight is min(product, c) times the ratio over the proximal policy."""
    cap = 3.0
    correction = Correction(weight="truncated", level="product", ratio_base=base, cap=cap)
    products = [1.0 * 0.25, 1.0 * 0.25, 4.0 * 10.0, 4.0 * 10.0]
    expected = [
        min(each, cap) / (mismatch if base == "behaviour" else 1.0)
        for each, mismatch in zip(products, MISMATCH.tolist(), strict=True)
    ]
    assert_allclose(weights(correction, (2, 2)), expected, rtol=1e-6)


@pytest.mark.parametrize(("weight", "level"), [("none", "token"), ("truncated", "token"), ("truncated", "product")])
def test_a_rollout_whose_mean_k3_is_larger_is_masked_and_no_other_changes(weight: TokenWeight, level: Level) -> None:
    k3 = [mismatch - 1.0 - math.log(mismatch) for mismatch in MISMATCH.tolist()]
    means = [(k3[0] + k3[1]) / 2, (k3[2] + k3[3]) / 2]
    assert means[0] < 0.5 < means[1]
    for base in BASES:
        plain = Correction(weight=weight, level=level, ratio_base=base)
        kept = weights(replace(plain, k3=0.5), (2, 2))
        assert kept.tolist() == [*weights(plain, (2, 2)).tolist()[:2], 0.0, 0.0]
        assert weights(replace(plain, k3=means[1] * 1.001), (2, 2)).tolist() == weights(plain, (2, 2)).tolist()
        assert weighed(replace(plain, k3=0.5), BEHAVIOUR, BEHAVIOUR + np.float32(1_000), ALL, [4]).tolist() == [0.0] * 4


def test_a_k3_needs_proximal_log_probs_and_whole_rows() -> None:
    loss = ClippedLoss(correction=Correction(k3=0.01))
    assert loss.correction.needs_proximal
    assert loss.reads >= {"behaviour", "proximal"}
    assert loss.unit == "row"


def test_tokens_nobody_sampled_are_no_part_of_a_rollouts_mean() -> None:
    kept = Correction(weight="mask", level="sequence")
    sampled = np.array([True, False, False, False])
    assert weighed(kept, BEHAVIOUR, PROXIMAL, sampled, [4]).tolist() == [1, 1, 1, 1]
    assert weighed(kept, BEHAVIOUR, PROXIMAL, ~ALL, [4]).tolist() == [1, 1, 1, 1]


def test_a_mask_without_a_band_of_its_own_has_that_of_its_level() -> None:
    assert Correction(weight="mask").band == TOKEN_BAND
    assert Correction(weight="mask", level="sequence", high=2.0).band == (SEQUENCE_BAND[0], 2.0)


def test_a_mismatch_too_large_for_a_float_is_truncated_and_masked_all_the_same() -> None:
    far = BEHAVIOUR + np.float32(1_000)
    for base in BASES:
        truncated = weighed(Correction(weight="truncated", ratio_base=base), BEHAVIOUR, far, ALL, [4])
        assert truncated.tolist() == [2.0 if base == "proximal" else 0.0] * 4
        assert not weighed(Correction(weight="mask", ratio_base=base), BEHAVIOUR, far, ALL, [4]).any()
