"""The cumulative Poisson distribution, for many means at once."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from oppo.admission.survival import FloatVector

AtMost: TypeAlias = Callable[[FloatVector], FloatVector]
"""Takes means, float64 [rows, n], and returns for row r the probability of at most the r-th count, in their shape."""

POINTS = 1024
"""Means of a table."""

BELOW, ABOVE = 8.0, 12.0
"""Standard deviations from a count to the ends of its table, beyond which the probability is 1 and 0."""


def summed(means: FloatVector) -> FloatVector:
    """Return the probability that a Poisson variable is at most r, for row r of the means, in their shape.

    Sums every term, so it suits few counts. Where the first term underflows, their probability is practically 0.
    """
    probability = np.exp(-means)
    total = probability.copy()
    for count in range(1, len(means)):
        probability = probability * means / count
        total[count:] += probability[count:]
    return total


def tabulated(counts: Sequence[int]) -> AtMost:
    """Return the function of :func:`summed` for any counts, exact to four digits, from one table for each count.

    The derivative of ``P[Poisson(m) <= c]`` in m is minus the density of a gamma distribution of shape c + 1, whose
    logarithm neither overflows nor underflows; the table is one minus its integral.
    """
    count = np.array(counts, np.float64)[:, None]
    centre = count + 1
    means = np.maximum(0.0, centre + np.sqrt(centre) * np.linspace(-BELOW, ABOVE, POINTS, dtype=np.float64))
    factorials = np.array([[math.lgamma(each + 1)] for each in counts])
    density = np.exp(count * np.log(np.maximum(means, np.finfo(np.float64).tiny)) - means - factorials)
    trapezoids = (density[:, 1:] + density[:, :-1]) / 2 * np.diff(means)
    integral = np.cumsum(np.pad(trapezoids, ((0, 0), (1, 0))), axis=1)
    probabilities = 1 - integral / integral[:, -1:]

    def at_most(queries: FloatVector) -> FloatVector:
        rows = zip(queries, means, probabilities, strict=True)
        return np.stack([np.interp(row, at, probability) for row, at, probability in rows])

    return at_most
