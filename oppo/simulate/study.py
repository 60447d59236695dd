"""Schedules of one workload beside each other: each run with the same seeds, and what to make of it."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing import active_children, get_context, parent_process
from typing import Final

from oppo.simulate.outcome import LAST, ScheduleOutcome
from oppo.simulate.schedules import Schedule
from oppo.simulate.simulated_run import SimulatedRun
from oppo.simulate.system import System, Workload

WORTHWHILE: Final = 1.05
"""A schedule that is less than so many times as fast as the present one is not worth a change."""

ALIKE: Final = 0.97
"""Of schedules within 3 % of the fastest, the one with the least lag is recommended."""

FEWEST: Final = 3
"""The fewest seeds for a recommendation: with fewer, chance decides."""

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
        cache: bytes of KV cache for a token of the actor; 0: unknown.
        refused: why a schedule cannot be chosen, whatever it takes; by name.
    """

    standings: Mapping[str, Standing]
    baseline: str
    cache: float = 0.0
    seeds: Sequence[int] = field(default=(0,))
    refused: Mapping[str, str] = field(default_factory=dict)

    def recommended(self, most_lag: float) -> str:
        """Return the name of the schedule to choose: the baseline's if no other is worth a change.

        It is the one with the least lag among those within 3 % of the fastest, of all that can be chosen, whose mean
        lag is at most ``most_lag``, and that are at least 5 % faster than the baseline with every seed.
        """
        allowed = {name: each for name, each in self.standings.items() if not self._fault(name, most_lag)}
        if not allowed:
            return self.baseline
        fastest = max(each.speed.mean for each in allowed.values())
        close = [name for name, each in allowed.items() if each.speed.mean >= ALIKE * fastest]
        return min(close, key=lambda name: (round(allowed[name].lag, 3), -allowed[name].speed.mean))

    def left_out(self, most_lag: float) -> Mapping[str, str]:
        """Return why each schedule that is faster than the recommended one is not recommended, by name."""
        chosen = self.recommended(most_lag)
        faster = [name for name, each in self.standings.items() if each.speed.mean > self.standings[chosen].speed.mean]
        alike = f"less than 3 % faster than {chosen!r}, at more lag"
        return {name: self._fault(name, most_lag) or alike for name in faster}

    def _fault(self, name: str, most_lag: float) -> str:
        """Return why a schedule is not worth a change; empty if it is."""
        each = self.standings[name]
        if name in self.refused:
            return self.refused[name]
        if each.lag > most_lag + 1e-9:
            return f"its mean lag of {each.lag:.2f} updates is above --lag {most_lag:g}"
        if each.speed.low < WORTHWHILE:
            return f"not 5 % faster than {self.baseline!r} with every seed"
        return ""


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
    """Simulate every schedule with every seed, in processes, one a core.

    Args:
        baseline: name of the schedule that the others are compared with.
        steps: of each run; a quarter of them, and the last ones, do not count.
        tell: called with a sentence before each schedule.
    """
    outcomes: dict[str, list[ScheduleOutcome]] = {}
    with _workers(len(schedules) * len(seeds)) as pool:
        made = {
            name: [pool.submit(_outcome, system, workload, each, steps, seed) for seed in seeds]
            for name, each in schedules.items()
        }
        for name, futures in made.items():
            tell(f"simulating {name}: {steps} steps, {len(seeds)} seeds")
            outcomes[name] = [future.result() for future in futures]
    base = outcomes[baseline]
    standings = {
        name: Standing(
            schedules[name], each, [one.per_token / other.per_token for one, other in zip(base, each, strict=True)]
        )
        for name, each in outcomes.items()
    }
    return Study(standings, baseline, system.cache, seeds)


def _outcome(system: System, workload: Workload, schedule: Schedule, steps: int, seed: int) -> ScheduleOutcome:
    count = steps + LAST + schedule.lookahead
    return SimulatedRun(system, workload, schedule, count, max(1, steps // WARM), seed).run()


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    """Yield processes for so many simulated runs; an error or a signal ends them at once."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    others = set(active_children())
    context = get_context("spawn")
    pool = ProcessPoolExecutor(min(cores, jobs), mp_context=context, initializer=_begin)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)
        for child in set(active_children()) - others:
            child.terminate()
        raise
    finally:
        pool.shutdown()


def _begin() -> None:
    """Prepare a process that simulates."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its children
    threading.Thread(target=_follow_parent, daemon=True).start()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)  # a run's tasks live for a step: collecting often finds nothing, at a tenth more


def _follow_parent() -> None:
    """End with a parent that was killed: nothing else tells a process that waits for work."""
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)
