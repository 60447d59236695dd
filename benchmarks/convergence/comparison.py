"""Paired differences over seeds with bootstrap intervals, and whether each lies within a band."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from benchmarks.convergence.arms import SERIAL
from benchmarks.convergence.results import Answers, Estimate, Outcome, Results

Quantity: TypeAlias = Literal["score", "kl"]

LEVEL: Final = 0.9
BAND: Final = 0.1
"""Differences within this fraction of serial's own gain count as none."""

LEAST: Final = 5
"""Least seeds for a decision: fewer show too little of their spread."""

DRAWS: Final = 10_000


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean over seeds, and the bounds of its bootstrap interval."""

    mean: float
    low: float
    high: float

    def in_parts_of(self, unit: float) -> Interval:
        """Return the interval divided by ``unit`` > 0."""
        return Interval(self.mean / unit, self.low / unit, self.high / unit)

    def within(self, band: float) -> bool:
        """Return whether the interval lies within ``band`` of 0."""
        return -band <= self.low and self.high <= band


def bootstrap(values: Sequence[float] | NDArray[np.float64], level: float = LEVEL) -> Interval:
    """Return the mean over seeds of one value each, with the percentile interval of resampled seeds.

    The draws are the same in every call. For n values the interval is too narrow, by about sqrt((n - 1) / n).
    """
    seeds = np.asarray(values, np.float64)
    picked = np.random.default_rng(0).integers(len(seeds), size=(DRAWS, len(seeds)))
    low, high = np.quantile(seeds[picked].mean(1), [(1 - level) / 2, (1 + level) / 2])
    return Interval(float(seeds.mean()), float(low), float(high))


@dataclass(frozen=True, slots=True)
class Difference:
    """The final value of an arm against serial's.

    Attributes:
        seeds: pairs that were compared.
        gain: mean gain of serial over the start.
        relative: the arm's final value less serial's, as a fraction of that gain.
        noise: standard error of ``relative.mean`` due to the number of examined responses alone.
    """

    quantity: Quantity
    seeds: int
    gain: float
    relative: Interval
    noise: float

    @property
    def holds(self) -> bool | None:
        """Whether the interval lies within the band; ``None``: too few seeds, or serial gained nothing."""
        if self.seeds < LEAST or not self.gain > 0:
            return None
        return self.relative.within(BAND)

    @property
    def conclusion(self) -> str:
        """Whether it holds, in words."""
        return {True: "holds", False: "does not hold", None: "is undecided"}[self.holds]


def difference(results: Results, arm: str, quantity: Quantity) -> Difference:
    """Return the difference of an arm to serial, over the seeds of which every arm has been run.

    Raises:
        ValueError: there is no such seed, or the base policy has not been examined.
    """
    ours, serial = ([_of(each.answers, quantity) for each in results.of(name)] for name in (arm, SERIAL.name))
    if results.start is None or not ours:
        raise ValueError("nothing can be compared before the base policy and all arms of one seed have been run")
    gain = float(np.mean([each.mean for each in serial])) - _of(results.start, quantity).mean
    pairs = list(zip(ours, serial, strict=True))
    errors = [a.error**2 + b.error**2 for a, b in pairs]
    return Difference(
        quantity,
        len(pairs),
        gain,
        bootstrap([a.mean - b.mean for a, b in pairs]).in_parts_of(gain),
        float(np.sqrt(sum(errors))) / len(pairs) / abs(gain),
    )


def harm(results: Results, arm: str) -> bool | None:
    """Return whether an arm's final score lies below serial's, all of the interval; ``None``: too few seeds."""
    found = difference(results, arm, "score")
    return None if found.holds is None else found.relative.high < 0


def curve(results: Results, arm: str, of: Callable[[Outcome], Sequence[float]]) -> list[Interval]:
    """Return the mean over seeds of a value of each step, by step."""
    table = np.array([of(outcome) for outcome in results.of(arm)], np.float64)
    return [bootstrap(column) for column in table.T]


def _of(answers: Answers, quantity: Quantity) -> Estimate:
    return answers.score if quantity == "score" else answers.kl
