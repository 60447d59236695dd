"""The expected decode steps between two cuts for any number of extra units: the law behind overcommit.

With B units in a batch, S(x) the probability that a response is longer than x tokens, N decode steps between two cuts
and M = ``max_deferrals``, the units admitted k steps ago are at k N + x tokens after x decode steps. On average

    parked(x)  = B * sum over k = 0 .. M-1 of S(k N + x)      remain that may be carried again
    overdue(x) = B * S(M N + x)                               remain that may not

Units end independently, so these numbers are nearly Poisson distributed. A step lasts until at most Delta units remain
and none of them is overdue; its expected length

    N(Delta) = integral over x >= 0 of  1 - P[Poisson(parked(x)) <= Delta] * P[Poisson(overdue(x)) = 0]

is solved for N. At Delta = 0 it is the expected longest of a batch. Without a bound on deferrals and without the spread
of the Poisson distribution it is the law ``B * sum over k >= 1 of S(k N) = Delta``.

By Little's law B new units a step and Delta carried ones make a mean lag of Delta / B steps.
"""

from __future__ import annotations

import numpy as np

from oppo.admission.poisson import summed, tabulated
from oppo.admission.survival import FloatVector, Survival

GRID = 256
"""Points of the integral."""

TABLE = 4096
"""Points of the tabulated survival function."""

KNOTS = 64
"""Largest number of values of ``extra`` solved for: a large batch costs little more than a small one."""

ROUNDS = 16
"""Halvings of the bracket of N: its error is below ``longest / 2**16``."""


def cut_intervals(survival: Survival, batch: int, most: int, max_deferrals: int) -> FloatVector:
    """Return the expected decode steps between two cuts for ``extra`` = 0 .. ``most``, float64 [most + 1].

    Args:
        survival: of the length of a unit.
        batch: units in a full batch.
        most: the largest ``extra`` of interest.
        max_deferrals: the cut waits for units of this age.
    """
    longest = survival.longest
    table = np.append(survival(np.linspace(0.0, longest, TABLE, endpoint=False, dtype=np.float64)), 0.0)
    width = longest / GRID
    after = (np.arange(GRID) + 0.5) * width
    extras = knots(most)
    at_most = summed if len(extras) > most else tabulated(extras)

    def remaining(tokens: FloatVector) -> FloatVector:
        """Return how many units of one step's admission are longer than ``tokens``."""
        units: FloatVector = batch * table[np.minimum(tokens * (TABLE / longest), TABLE).astype(np.int64)]
        return units

    def expected(interval: FloatVector) -> FloatVector:
        """Return the expected length of a step after steps of length ``interval``, for each of ``extras``."""
        ages = np.arange(max_deferrals)[:, None, None] * interval[:, None]
        parked = remaining(ages + after).sum(0)
        overdue = remaining(max_deferrals * interval[:, None] + after)
        length: FloatVector = (1 - at_most(parked) * np.exp(-overdue)).sum(1) * width
        return length

    low, high = np.zeros(len(extras)), np.full(len(extras), longest)
    for _ in range(ROUNDS):  # expected() falls with the interval, so the solution is unique
        middle = (low + high) / 2
        longer = expected(middle) > middle
        low, high = np.where(longer, middle, low), np.where(longer, high, middle)
    intervals: FloatVector = np.maximum(1.0, (low + high) / 2)
    return np.interp(np.arange(most + 1), extras, intervals)


def knots(most: int) -> list[int]:
    """Return the values of ``extra`` to solve for: all if few, else 0 .. ``most`` with gaps equal in square roots.

    A gap is then at most the standard deviation of a Poisson variable of that mean.
    """
    if most < KNOTS:
        return list(range(most + 1))
    roots = np.linspace(0.0, most**0.5, KNOTS, dtype=np.float64)
    return [int(each) for each in np.unique(np.rint(roots**2))]
