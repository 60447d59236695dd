"""The distribution function of a Poisson variable, by its sum and by its tables."""

from __future__ import annotations

import math

import numpy as np
import pytest

from oppo.admission.forecast import summed, tabulated


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
