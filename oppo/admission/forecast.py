"""What a step will take: response lengths, decode steps between two cuts, and the fitted pace of the models.

The expected decode steps between two cuts for any number of extra units: the law behind overcommit.

With B units in a batch, S(x) the probability that a response is longer than x tokens, N decode steps between two cuts
and M = ``max_deferrals``, the units admitted k steps ago are at k N + x tokens after x decode steps. On average

    deferred(x)  = B * sum over k = 0 .. M-1 of S(k N + x)      remain that may be deferred again
    overdue(x) = B * S(M N + x)                               remain that may not

Units end independently, so these numbers are nearly Poisson distributed. A step lasts until at most Delta units remain
and none of them is overdue; its expected length

    N(Delta) = integral over x >= 0 of  1 - P[Poisson(deferred(x)) <= Delta] * P[Poisson(overdue(x)) = 0]

is solved for N. At Delta = 0 it is the expected longest of a batch. Without a bound on deferrals and without the spread
of the Poisson distribution it is the law ``B * sum over k >= 1 of S(k N) = Delta``.

By Little's law B new units a step and Delta deferred ones make a mean staleness of Delta / B steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from oppo.admission.protocol import Observation

FloatVector = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Survival:
    """The probability that a response is longer than x tokens: a step function that falls from 1 to 0."""

    lengths: FloatVector  # float64 [n], tokens, ascending: where it falls
    beyond: FloatVector  # float64 [n], the probability of more than that many tokens; 0 at the last

    def __call__(self, tokens: FloatVector) -> FloatVector:
        steps = np.concatenate((np.ones(1), self.beyond))
        return steps[np.searchsorted(self.lengths, tokens, side="right")]

    @property
    def longest(self) -> float:
        return float(self.lengths[-1])

    @property
    def mean(self) -> float:
        # The integral of the probability.
        before = np.concatenate((np.ones(1), self.beyond[:-1]))
        return float(np.sum(before * np.diff(self.lengths, prepend=0.0)))


def kaplan_meier(finished: Sequence[int], deferred: Sequence[int]) -> Survival:
    """Return the estimate of Kaplan and Meier (1958) from complete and from censored lengths.

    The length of a deferred response is a lower bound: leaving it out, or counting it as complete, would shorten the
    tail. If the longest of all is a deferred one, it counts as complete (Efron 1967), so that the curve ends at 0.

    Args:
        finished: lengths of complete responses, in tokens; at least one.
        deferred: lengths so far of incomplete ones.

    Example:
        >>> curve = kaplan_meier([1, 2, 3], deferred=[2])
        >>> curve.beyond.tolist()
        [0.75, 0.5, 0.0]
    """
    everything = np.sort(np.array([*finished, *deferred], np.float64))
    ended = np.array(finished, np.float64)
    if everything[-1] > ended.max():
        ended = np.append(ended, everything[-1])
    lengths, events = np.unique(ended, return_counts=True)
    at_risk = len(everything) - np.searchsorted(everything, lengths, side="left")
    beyond: FloatVector = np.cumprod(1 - events / at_risk, dtype=np.float64)
    beyond[-1] = 0.0
    return Survival(lengths, beyond)


AtMost: TypeAlias = Callable[[FloatVector], FloatVector]
"""Takes means, float64 [rows, n], and returns for row r the probability of at most the r-th count, in their shape."""

POINTS = 1024  # means of a table

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


GRID = 256  # points of the integral
TABLE = 4096  # points of the tabulated survival function
KNOTS = 64  # largest number of values of `overcommit` solved for: a large batch costs little more than a small one
ROUNDS = 16  # halvings of the bracket of N: its error is below `longest / 2**16`


def cut_intervals(survival: Survival, batch: int, most: int, max_deferrals: int) -> FloatVector:
    """Return the expected decode steps between two cuts for ``overcommit`` = 0 .. ``most``, float64 [most + 1]."""
    longest = survival.longest
    table = np.append(survival(np.linspace(0.0, longest, TABLE, endpoint=False, dtype=np.float64)), 0.0)
    width = longest / GRID
    after = (np.arange(GRID) + 0.5) * width
    extras = knots(most)
    at_most = summed if len(extras) > most else tabulated(extras)

    def remaining(tokens: FloatVector) -> FloatVector:
        # The units of one step's admission that are longer.
        units: FloatVector = batch * table[np.minimum(tokens * (TABLE / longest), TABLE).astype(np.int64)]
        return units

    def expected(interval: FloatVector) -> FloatVector:
        # The length of a step after steps of length |interval|, for each of |extras|.
        ages = np.arange(max_deferrals)[:, None, None] * interval[:, None]
        deferred = remaining(ages + after).sum(0)
        overdue = remaining(max_deferrals * interval[:, None] + after)
        length: FloatVector = (1 - at_most(deferred) * np.exp(-overdue)).sum(1) * width
        return length

    low, high = np.zeros(len(extras)), np.full(len(extras), longest)
    for _ in range(ROUNDS):  # expected() falls with the interval, so the solution is unique
        middle = (low + high) / 2
        longer = expected(middle) > middle
        low, high = np.where(longer, middle, low), np.where(longer, high, middle)
    intervals: FloatVector = np.maximum(1.0, (low + high) / 2)
    return np.interp(np.arange(most + 1), extras, intervals)


def knots(most: int) -> list[int]:
    """Return the values of ``overcommit`` to solve for: all if few, else 0 .. ``most`` with gaps equal in square roots.

    A gap is then at most the standard deviation of a Poisson variable of that mean.
    """
    if most < KNOTS:
        return list(range(most + 1))
    roots = np.linspace(0.0, most**0.5, KNOTS, dtype=np.float64)
    return [int(each) for each in np.unique(np.rint(roots**2))]


PER_STEP = 0.8  # prior mean of the share of decode time that is paid per decode step; the other share is paid per token
SPREAD = 0.3  # standard deviation of the prior of each share
LEAST_NOISE = 0.02
"""Lower bound of the relative noise of decode seconds, which a few collinear points would underestimate."""


@dataclass(frozen=True, slots=True)
class ScorerPace:
    """The seconds of one scorer for a step's batch: of all its work, and of the work left when decoding ends."""

    busy: float
    tail: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Predicts the seconds of a step from the seconds of its phases.

    Without lookahead they are ``max(decode + tail, busy) + rest``, with the slowest scorer's tail and busy. With a
    lookahead of n, n + 1 steps are alive and each phase has one of them at a time, so a step takes::

        max(decode, busy, rest, (decode + tail + rest) / (n + 1))

    Deferral shortens decoding alone, so it gains nothing below the other two.
    """

    step: float  # seconds per decode step
    token: float  # seconds per token of a unit, for a whole batch
    scorers: tuple[ScorerPace, ...]
    rest: float  # seconds of everything else: advantages, update, weight sync
    lookahead: int = 0  # number of steps that begin before the current one has ended

    def seconds(self, decode_steps: FloatVector, mean_length: float) -> FloatVector:
        """Return the predicted seconds for each number of decode steps, in their shape."""
        decode = self.step * decode_steps + self.token * mean_length
        busy = max((scorer.busy for scorer in self.scorers), default=0.0)
        tail = max((scorer.tail for scorer in self.scorers), default=0.0)
        if not self.lookahead:
            return np.maximum(decode + tail, busy) + self.rest
        chain = (decode + tail + self.rest) / (self.lookahead + 1)
        return np.maximum(np.maximum(decode, chain), max(busy, self.rest))


def pace(window: Sequence[Observation], batch: int) -> Pace:
    step, token = decode_costs(window, batch)
    rest = float(np.mean([seen.rest_seconds for seen in window]))
    return Pace(step, token, scorer_paces(window), rest, max((seen.lookahead for seen in window), default=0))


def decode_costs(window: Sequence[Observation], batch: int) -> tuple[float, float]:
    """Return the seconds per decode step, and per token of a unit; neither is negative.

    A Bayesian regression: with everything in units of its mean, ``seconds = p * steps + q * tokens + noise``, with the
    priors p ~ N(0.8, 0.3) and q ~ N(0.2, 0.3). The noise is estimated from the residuals, so the prior decides what the
    points leave open: everything if all steps are alike.
    """
    observed = np.array([(seen.decode_steps, seen.tokens / batch, seen.decode_seconds) for seen in window], np.float64)
    means = observed.mean(0)
    inputs, seconds = (observed / means)[:, :2], (observed / means)[:, 2]
    spare = max(1, len(window) - 2)
    noise = float(np.linalg.norm(seconds - inputs @ _shares(inputs, seconds, LEAST_NOISE))) / spare**0.5
    of_steps, of_tokens = np.maximum(0.0, _shares(inputs, seconds, max(noise, LEAST_NOISE)))
    if of_tokens == 0 or of_steps == 0:
        of_steps, of_tokens = float(of_steps > 0), float(of_tokens > 0)
    return float(of_steps * means[2] / means[0]), float(of_tokens * means[2] / means[1])


def _shares(inputs: FloatVector, seconds: FloatVector, noise: float) -> FloatVector:
    # The most likely ones, of steps and of tokens, float64 [2]; ``noise`` is a standard deviation.
    prior = np.array([PER_STEP, 1 - PER_STEP])
    precision = inputs.T @ inputs + (noise / SPREAD) ** 2 * np.eye(2)
    shares: FloatVector = prior + np.linalg.solve(precision, inputs.T @ (seconds - inputs @ prior))
    return shares


def scorer_paces(window: Sequence[Observation]) -> tuple[ScorerPace, ...]:
    # Work after decoding has one of two causes. Either the scorer was busy all along with more work than decoding
    # lasted: a longer step would hide it. Or the work was not yet possible although the scorer was idle: a step of any
    # length has it. So the tail is the work after decoding, times the share of decoding in which the scorer was idle.
    busy: dict[str, list[float]] = {}
    tail: dict[str, list[float]] = {}
    for seen in window:
        for scoring in seen.scoring:
            idle = max(0.0, 1 - scoring.before / seen.decode_seconds) if seen.decode_seconds > 0 else 1.0
            busy.setdefault(scoring.stage, []).append(scoring.busy)
            tail.setdefault(scoring.stage, []).append(scoring.after * idle)
    return tuple(ScorerPace(float(np.mean(busy[stage])), float(np.mean(tail[stage]))) for stage in busy)
