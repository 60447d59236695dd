"""Scores to rewards: the running moments against numpy's, and each step of the shaping by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo.events import BoolArray, FloatArray
from oppo.returns import RunningMoments, ScoreShaping

STOPPED: BoolArray = np.array([True, True, False])
LENGTHS = np.array([2, 6, 9])


def floats(*values: float) -> FloatArray:
    return np.array(values, np.float32)


@given(st.lists(st.lists(st.floats(-1e3, 1e3, width=32), max_size=5), min_size=1, max_size=6))
def test_moments_of_batches_are_those_of_all_scores_at_once(batches: list[list[float]]) -> None:
    moments, every = RunningMoments(), floats(*(score for batch in batches for score in batch)).astype(np.float64)
    for batch in batches:
        moments = moments.after(floats(*batch))
    assert moments.count == len(every)
    if len(every) > 1:
        assert moments.mean == pytest.approx(every.mean(), rel=1e-9, abs=1e-9)
        assert moments.squares == pytest.approx(((every - every.mean()) ** 2).sum(), rel=1e-9, abs=1e-6)


def test_the_defaults_change_no_bit_and_keep_no_state() -> None:
    scores = floats(0.1, -3.7, 1e30)
    shaping = ScoreShaping().after(scores)
    assert shaping == ScoreShaping()
    assert np.array_equal(shaping.shaped(scores, STOPPED, LENGTHS), scores)


def test_a_response_that_did_not_stop_pays_and_the_others_do_not() -> None:
    shaped = ScoreShaping(missing_eos_penalty=1.5).shaped(floats(1, 2, 3), STOPPED, LENGTHS)
    assert shaped.tolist() == [1.0, 2.0, 1.5]


def test_scores_are_normalised_then_clipped_then_scaled_then_penalised() -> None:
    shaping = ScoreShaping(norm=True, clip=1.0, scale=10.0, missing_eos_penalty=0.5)
    shaping = shaping.after(floats(0, 4)).after(floats(2, 2, 12))
    assert (shaping.moments.count, shaping.moments.mean) == (5, 4.0)
    std = float(np.std([0, 4, 2, 2, 12], ddof=1))
    assert shaping.moments.std == pytest.approx(std)
    expected = [10 * (2 - 4) / std, 10 * (2 - 4) / std, 10 * 1.0 - 0.5]
    assert shaping.shaped(floats(2, 2, 12), STOPPED, LENGTHS).tolist() == pytest.approx(expected)


def test_a_long_response_pays_more_the_nearer_it_comes_to_the_cap() -> None:
    shaping = ScoreShaping(scale=10.0, long_from=4, long_to=8, long_penalty=2.0)
    assert shaping.shaped(floats(1, 1, 1), STOPPED, LENGTHS).tolist() == [10.0, 9.0, 8.0]
    assert ScoreShaping(long_from=4, long_to=4).shaped(floats(1, 1, 1), STOPPED, LENGTHS).tolist() == [1, 1, 1]
    with pytest.raises(ValueError, match="grows between two lengths, long_from = 5 and long_to = 4: expected 0 <="):
        ScoreShaping(long_from=5, long_to=4)


def test_scores_that_are_all_equal_become_zero() -> None:
    shaping = ScoreShaping(norm=True).after(floats(3, 3, 3))
    assert shaping.shaped(floats(3, 3, 3), STOPPED, LENGTHS).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("clip", "scale", "penalty", "sentence"),
    [
        (0.0, 1.0, 0.0, "clip must be more than 0, not 0.0"),
        (1.0, math.nan, 0.0, "scale of ScoreShaping must be a finite number, not nan"),
        (1.0, 1.0, -1.0, "missing_eos_penalty must be at least 0, not -1.0"),
    ],
)
def test_impossible_shapings_are_refused(clip: float, scale: float, penalty: float, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        ScoreShaping(clip=clip, scale=scale, missing_eos_penalty=penalty)
