"""Paired differences over seeds with bootstrap intervals, and whether each lies within a band."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean
from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.convergence.results import Answers, Outcome, Results

LEVEL: Final = 0.9
DRAWS: Final = 10_000

# The part of the baseline's gain by which the pace of learning is told: the last of it is slow and noisy for all
TARGET: Final = 0.75


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds, and the bounds of its bootstrap interval."""

    mean: float
    low: float
    high: float

    def in_parts_of(self, unit: float) -> Interval:
        """Return the interval divided by ``unit`` > 0."""
        return Interval(self.mean / unit, self.low / unit, self.high / unit)

    def __str__(self) -> str:
        return f"{self.mean:+.1%} ({self.low:+.1%} to {self.high:+.1%})"


def resampled(seeds: int) -> NDArray[np.int64]:
    """Return the seeds of every draw, int64 [DRAWS, seeds]; the same in every call."""
    return np.random.default_rng(0).integers(seeds, size=(DRAWS, seeds))


def bootstrap(values: Sequence[float] | NDArray[np.float64], level: float = LEVEL) -> Interval:
    """Return the mean over seeds of one value each, with the percentile interval of resampled seeds.

    The draws are the same in every call. For n values the interval is too narrow, by about sqrt((n - 1) / n).
    """
    seeds = np.asarray(values, np.float64)
    low, high = np.quantile(seeds[resampled(len(seeds))].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(seeds.mean()), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Quantity:
    of: Callable[[Outcome], float]  # its value in an outcome
    # what an outcome gained of it over the base policy, whose answers are given
    gained: Callable[[Outcome, Answers], float]


# Mean score of the final policy's answers
SCORE: Final = Quantity(
    lambda outcome: outcome.answers.score.mean,
    lambda outcome, start: outcome.answers.score.mean - start.score.mean,
)

# Of the final policy's answers, from the base policy
KL: Final = Quantity(
    lambda outcome: outcome.answers.kl.mean,
    lambda outcome, start: outcome.answers.kl.mean - start.kl.mean,
)

# Mean score of what was trained, written after 1, 2, ... updates, up to half of all: the faster the rise, the more
FIRST_HALF: Final = Quantity(
    lambda outcome: fmean(early(outcome)),
    lambda outcome, _start: fmean(early(outcome)) - by_updates(outcome)[0],
)


def difference(results: Results, arm: str, against: str, quantity: Quantity) -> Interval:
    """Return a quantity of an arm less that of another, paired by seed, as a fraction of what the other has gained."""
    ours, others = results.of(arm), results.of(against)
    if not ours:
        raise ValueError("nothing can be compared before all arms of one seed have been run")
    gain = fmean(quantity.gained(each, results.known_start) for each in others)
    return bootstrap([quantity.of(a) - quantity.of(b) for a, b in zip(ours, others, strict=True)]).in_parts_of(gain)


def curve(results: Results, arm: str, of: Callable[[Outcome], Sequence[float]]) -> list[Interval]:
    """Return the mean over seeds of a value at each point, for the points that every seed has."""
    columns = zip(*(of(outcome) for outcome in results.of(arm)), strict=False)
    return [bootstrap(column) for column in columns]


def by_updates(outcome: Outcome) -> tuple[float, ...]:
    """Return the mean score of what was trained by the updates that its writer had seen: 0, 1, and so on.

    A step's rollouts lag behind its update, so that with the same learning their scores come later: by the steps of
    lookahead, and less for what is synced in flight. Between two steps the score is interpolated.
    """
    seen = np.arange(len(outcome.scores)) - np.array(outcome.known_off_policy.lags, np.float64)
    points, step_of = np.unique(seen, return_inverse=True)
    scores = np.bincount(step_of, outcome.scores) / np.bincount(step_of)
    return tuple(np.interp(np.arange(int(points[-1]) + 1), points, scores).tolist())


def early(outcome: Outcome) -> tuple[float, ...]:
    half = len(outcome.scores) // 2
    scores = by_updates(outcome)[1 : half + 1]
    if not half or len(scores) < half:
        raise ValueError(
            f"of {len(outcome.scores)} steps none trained what was written after {half} updates: make more --steps"
        )
    return scores


def made_at(outcome: Outcome) -> tuple[float, ...]:
    """Return the seconds from the start of the run after which 0, 1, 2, ... updates had been made."""
    return tuple(accumulate(outcome.seconds, initial=0.0))


@dataclass(frozen=True, slots=True)
class Taken:
    """What an arm takes to learn, of something that grows with its updates."""

    # until the mean over seeds of what was trained scores `TARGET` of the baseline's gain; infinite where it does not
    # within the run
    mean: float
    ratio: Interval  # to what the baseline takes
    last: float  # at the last point that was seen: an infinite mean is one above it
    last_ratio: float  # the same to what the baseline takes


@dataclass(frozen=True, slots=True)
class Pace:
    # whose weights write the rollouts: a step has to be `updates.ratio` times as fast as the baseline's for the arm to
    # take no longer
    updates: Taken
    seconds: Taken  # from the start of the run until these updates have been made


def pace(results: Results, arm: str, baseline: str) -> Pace:
    """Return how long an arm takes to learn, beside the baseline with the same seeds."""
    start, seeds = results.known_start, len(results.whole())
    target = start.score.mean + TARGET * fmean(SCORE.gained(each, start) for each in results.of(baseline))
    picked = np.vstack([np.arange(seeds), resampled(seeds)])
    (ours, mine, last), (others, unit, _) = (_reached_by(results.of(name), picked, target) for name in (arm, baseline))
    return Pace(_taken(ours, others, last[0]), _taken(mine, unit, last[1]))


def _reached_by(
    outcomes: Sequence[Outcome], picked: NDArray[np.int64], target: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], tuple[float, float]]:
    """Return the updates and the seconds until the mean of the picked runs scores ``target``, and the last of both."""
    scores = np.array(list(zip(*map(by_updates, outcomes), strict=False)), np.float64).T
    seconds = np.array([made_at(each)[: scores.shape[1]] for each in outcomes], np.float64)
    updates = reached(scores[picked].mean(1), target)
    last = scores.shape[1] - 1
    return updates, _at(seconds[picked].mean(1), updates), (float(last), float(seconds[:, last].mean()))


def _at(curves: NDArray[np.float64], points: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each curve's value at its own point, float64 [N]; infinite where the point is."""
    known = np.where(np.isfinite(points), points, 0.0)
    rows, before = np.arange(len(curves)), np.floor(known).astype(np.int64)
    after = np.minimum(before + 1, curves.shape[1] - 1)
    values = curves[rows, before] + (known - before) * (curves[rows, after] - curves[rows, before])
    return np.where(np.isfinite(points), values, np.inf)


def _taken(ours: NDArray[np.float64], others: NDArray[np.float64], last: float) -> Taken:
    """Return what was taken of one quantity; the first of each is that of all seeds, the others are the draws."""
    (mean, *_), (unit, *_) = ours, others
    ratios = np.divide(ours[1:], others[1:], out=np.full(DRAWS, np.inf), where=np.isfinite(ours[1:]))
    low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2], method="nearest")
    return Taken(float(mean), Interval(float(mean / unit), float(low), float(high)), last, float(last / unit))


def reached(curves: NDArray[np.float64], target: float) -> NDArray[np.float64]:
    """Return where each curve first reaches a value, in points and parts of them, float64 [N] (or infinity)."""
    above = curves >= target
    at = np.maximum(above.argmax(1), 1)
    rows = np.arange(len(curves))
    before, after = curves[rows, at - 1], curves[rows, at]
    part = np.clip((target - before) / np.where(after > before, after - before, 1.0), 0.0, 1.0)
    return np.where(above.any(1), at - 1 + part, np.inf)
