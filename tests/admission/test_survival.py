"""How long responses are, from complete and censored lengths."""

from __future__ import annotations

import numpy as np
import pytest

from oppo.admission.forecast import kaplan_meier


def test_without_parked_responses_it_is_the_empirical_distribution() -> None:
    curve = kaplan_meier([4, 1, 2, 2], parked=[])
    assert curve(np.array([0.0, 1.0, 1.9, 2.0, 3.0, 4.0])).tolist() == [1.0, 0.75, 0.75, 0.25, 0.25, 0.0]
    assert curve.mean == pytest.approx(np.mean([4, 1, 2, 2]))


def test_a_parked_response_counts_as_longer_than_what_it_has() -> None:
    without = kaplan_meier([10, 20, 30, 40], parked=[])
    with_it = kaplan_meier([10, 20, 30, 40], parked=[15])
    assert with_it.mean > without.mean
    assert with_it(np.array([20.0]))[0] == pytest.approx(4 / 5 * 2 / 3)


def test_a_parked_response_beyond_all_others_ends_the_curve() -> None:
    curve = kaplan_meier([10, 20], parked=[50])
    assert curve.longest == 50
    assert curve(np.array([20.0, 49.0, 50.0])) == pytest.approx([1 / 3, 1 / 3, 0.0])


def test_censored_lengths_give_the_mean_of_what_is_generated() -> None:
    """Longer responses are parked more often: their lengths so far, taken for complete, would bias the mean."""
    random = np.random.default_rng(0)
    lengths = random.lognormal(4.0, 0.8, 20_000)
    seen = random.uniform(0, 400, len(lengths))
    finished = lengths[lengths <= seen]
    parked = seen[lengths > seen]
    curve = kaplan_meier(finished.astype(int).tolist(), parked.astype(int).tolist())
    assert curve.mean == pytest.approx(lengths.mean(), rel=0.03)
    assert finished.mean() < 0.85 * lengths.mean()
