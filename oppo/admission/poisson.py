"""The probability that a Poisson variable is at most so much, for many means at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from oppo.admission.survival import FloatVector

AtMost: TypeAlias = Callable[[FloatVector], FloatVector]
"""Takes means, float64 [rows, n], and returns for row r the probability of at most the r-th count, in their shape."""

POINTS = 1024
"""Means at which the probability is tabulated."""

BELOW, ABOVE = 8.0, 12.0
"""Standard deviations from a count's own mean to the ends of its table, beyond which the probability is 1 and 0."""


def summed(means: FloatVector) -> FloatVector:
    """Return the probability that a Poisson variable is at most r, for row r of its means, in their shape.

    Every count is worked through: for few of them. Where the first term underflows, those few are as good as never met.
    """
    probability = np.exp(-means)
    total = probability.copy()
    for count in range(1, len(means)):
        probability = probability * means / count
        total[count:] += probability[count:]
    return total


def tabulated(counts: Sequence[int]) -> AtMost:
    """Return the same for any counts, right to four digits, by tables that are made once and at no great cost.

    ``P[Poisson(m) <= c]`` falls with m as the density of a gamma distribution with the shape c + 1, whose logarithm
    neither overflows nor underflows; so it is one less the integral of that.
    """
    count = np.array(counts, np.float64)[:, None]
    centre = count + 1
    means = np.maximum(0.0, centre + np.sqrt(centre) * np.linspace(-BELOW, ABOVE, POINTS, dtype=np.float64))
    factorials = np.array([[math.lgamma(each + 1)] for each in counts])
    density = np.exp(count * np.log(np.maximum(means, np.finfo(np.float64).tiny)) - means - factorials)
    parts = (density[:, 1:] + density[:, :-1]) / 2 * np.diff(means)
    fallen = np.cumsum(np.pad(parts, ((0, 0), (1, 0))), axis=1)
    probabilities = 1 - fallen / fallen[:, -1:]

    def at_most(asked: FloatVector) -> FloatVector:
        rows = zip(asked, means, probabilities, strict=True)
        return np.stack([np.interp(row, at, probability) for row, at, probability in rows])

    return at_most
