"""The survival function of response lengths, estimated from complete and incomplete responses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

FloatVector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Survival:
    """The probability that a response is longer than x tokens: a step function that falls from 1 to 0.

    Attributes:
        lengths: float64 [n], tokens, ascending: where it falls.
        beyond: float64 [n], the probability of more than that many tokens; 0 at the last.
    """

    lengths: FloatVector
    beyond: FloatVector

    def __call__(self, tokens: FloatVector) -> FloatVector:
        """Return the probability of a longer response, in the shape of ``tokens``."""
        steps = np.concatenate((np.ones(1), self.beyond))
        return steps[np.searchsorted(self.lengths, tokens, side="right")]

    @property
    def longest(self) -> float:
        """The length that no response exceeds, in tokens."""
        return float(self.lengths[-1])

    @property
    def mean(self) -> float:
        """The expected length in tokens: the integral of the probability."""
        before = np.concatenate((np.ones(1), self.beyond[:-1]))
        return float(np.sum(before * np.diff(self.lengths, prepend=0.0)))


def kaplan_meier(finished: Sequence[int], parked: Sequence[int]) -> Survival:
    """Return the estimate of Kaplan and Meier (1958) from complete and from censored lengths.

    The length of a parked response is a lower bound: leaving it out, or counting it as complete, would shorten the
    tail. If the longest of all is a parked one, it counts as complete (Efron 1967), so that the curve ends at 0.

    Args:
        finished: lengths of complete responses, in tokens; at least one.
        parked: lengths so far of incomplete ones.

    Example:
        >>> curve = kaplan_meier([1, 2, 3], parked=[2])
        >>> curve.beyond.tolist()
        [0.75, 0.5, 0.0]
    """
    everything = np.sort(np.array([*finished, *parked], np.float64))
    ended = np.array(finished, np.float64)
    if everything[-1] > ended.max():
        ended = np.append(ended, everything[-1])
    lengths, events = np.unique(ended, return_counts=True)
    at_risk = len(everything) - np.searchsorted(everything, lengths, side="left")
    beyond: FloatVector = np.cumprod(1 - events / at_risk, dtype=np.float64)
    beyond[-1] = 0.0
    return Survival(lengths, beyond)
