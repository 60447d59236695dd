"""Schedules of one workload beside each other: each run with the same seeds, and what to make of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from oppo.simulate.outcome import LAST, ScheduleOutcome
from oppo.simulate.schedules import Schedule
from oppo.simulate.simulated_run import SimulatedRun
from oppo.simulate.system import System, Workload

WORTHWHILE: Final = 1.05
"""A schedule that is less than so many times as fast as the present one is not worth a change."""

ALIKE: Final = 0.97
"""Of schedules within 3 % of the fastest, the one with the least lag is recommended."""

WARM: Final = 4
"""Every so-many-th of the steps does not count: those in which a schedule fills its buffers."""


@dataclass(frozen=True, slots=True)
class Spread:
    """The mean over seeds, with the least and the greatest value.

    The range of n seeds holds the median of any further ones with probability 1 - 2^(1 - n).
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        sample = list(values)
        return cls(sum(sample) / len(sample), min(sample), max(sample))


@dataclass(frozen=True, slots=True)
class Standing:
    """One schedule in a study.

    Attributes:
        outcomes: by seed.
        speeds: against the baseline, by seed: trained tokens a second.
    """

    schedule: Schedule
    outcomes: Sequence[ScheduleOutcome]
    speeds: Sequence[float]

    @property
    def seconds(self) -> Spread:
        """Seconds of a step."""
        return Spread.of(outcome.seconds for outcome in self.outcomes)

    @property
    def speed(self) -> Spread:
        """Speed against the baseline; above 1 is faster."""
        return Spread.of(self.speeds)

    @property
    def lag(self) -> float:
        """Mean versions between a rollout's first token and its update."""
        return Spread.of(outcome.lag for outcome in self.outcomes).mean

    @property
    def longest_lag(self) -> int:
        """The largest."""
        return max(outcome.longest_lag for outcome in self.outcomes)

    @property
    def idle(self) -> float:
        """Share of the time in which a replica of the actor decodes nothing."""
        return Spread.of(outcome.idle for outcome in self.outcomes).mean

    @property
    def peak_tokens(self) -> float:
        """Most tokens that were decoded at once, prompts included."""
        return max(outcome.peak_tokens for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Study:
    """The schedules of a workload beside each other.

    Attributes:
        standings: by name, in the order given.
        baseline: the schedule that the others are compared with.
        cache: bytes of keys and values for a token of the actor; 0: unknown.
    """

    standings: Mapping[str, Standing]
    baseline: str
    cache: float = 0.0
    seeds: Sequence[int] = field(default=(0,))

    def recommended(self, most_lag: float) -> str:
        """Return the name of the schedule to choose: the baseline's if no other is worth a change.

        It is the one with the least lag among those within 3 % of the fastest, of all whose mean lag is at most
        ``most_lag``; and it is at least 5 % faster than the baseline with every seed.
        """
        allowed = {name: each for name, each in self.standings.items() if each.lag <= most_lag + 1e-9}
        if not allowed:
            return self.baseline
        fastest = max(each.speed.mean for each in allowed.values())
        close = [name for name, each in allowed.items() if each.speed.mean >= ALIKE * fastest]
        chosen = min(close, key=lambda name: (round(allowed[name].lag, 3), -allowed[name].speed.mean))
        return chosen if allowed[chosen].speed.low >= WORTHWHILE else self.baseline


def study(
    system: System,
    workload: Workload,
    schedules: Mapping[str, Schedule],
    *,
    baseline: str,
    steps: int,
    seeds: Sequence[int],
    tell: Callable[[str], None] = lambda sentence: None,
) -> Study:
    """Simulate every schedule with every seed.

    Args:
        baseline: name of the schedule that the others are compared with.
        steps: of each run; a quarter of them, and the last ones, do not count.
        tell: called with a sentence before each schedule.
    """
    outcomes: dict[str, list[ScheduleOutcome]] = {}
    for name, schedule in schedules.items():
        tell(f"simulating {name}: {steps} steps, {len(seeds)} seeds")
        extra = LAST + schedule.lookahead
        runs = [SimulatedRun(system, workload, schedule, steps + extra, max(1, steps // WARM), seed) for seed in seeds]
        outcomes[name] = [each.run() for each in runs]
    base = outcomes[baseline]
    standings = {
        name: Standing(
            schedules[name], each, [one.per_token / other.per_token for one, other in zip(base, each, strict=True)]
        )
        for name, each in outcomes.items()
    }
    return Study(standings, baseline, system.cache, seeds)
