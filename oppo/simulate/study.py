"""Compares schedules of one workload, each run with the same seeds, and recommends one in words."""

from __future__ import annotations

import gc
import json
import math
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from multiprocessing import active_children, get_context, parent_process
from types import MappingProxyType
from typing import Final

import numpy as np
import tomli_w
from rich.table import Table

from oppo.log import logger
from oppo.simulate.profile import System, Workload
from oppo.simulate.schedule import Schedule, ScheduleOutcome, SimulatedRun

WORTHWHILE: Final = 1.05  # the least speed-up over the present schedule that is worth a change

ALIKE: Final = 0.97  # of schedules within 3% of the fastest, the one with the least staleness is recommended

CONFIDENCE: Final = 1.959964  # standard deviations of a normal distribution that an interval of 95% reaches

# The default question, and `--precise`: most rollouts simulated of a schedule, half of an interval at which it is right
DEFAULT, PRECISE = (18_432, 0.03), (147_456, 0.005)
STEPS: Final = (6, 24)  # the fewest and the most of a run unless they are given
A_RUN: Final = 6144  # rollouts of a run, as far as `STEPS` let it
SETTLED: Final = 16  # the fewest steps of a controller that adapts, unless they are given
SEEDS: Final = 32  # the most of a study
GRAINS: Final = 1024  # ends of responses that are told apart where 512 are in a step; of more, fewer


@dataclass(frozen=True, slots=True)
class Interval:
    """The mean of some measurements of the same, and its confidence interval of 95%, by Student's distribution.

    Its quantile is the series of Abramowitz and Stegun 26.7.5.
    """

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Interval:
        sample = np.array(list(values), np.float64)
        mean, free, z = float(sample.mean()), len(sample) - 1, CONFIDENCE
        if not free:
            return cls(mean, mean, mean)
        quantile = (
            z
            + (z**3 + z) / (4 * free)
            + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * free**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * free**3)
        )
        half = quantile * float(sample.std(ddof=1)) / math.sqrt(len(sample))
        return cls(mean, mean - half, mean + half)


@dataclass(frozen=True, slots=True)
class Standing:
    """One schedule in a study; ``speeds``: trained tokens a second over the baseline's, by seed and part of the run."""

    schedule: Schedule
    outcomes: Sequence[ScheduleOutcome]
    speeds: Sequence[float]

    @property
    def seconds(self) -> float:
        return _mean(outcome.seconds for outcome in self.outcomes)

    @property
    def speed(self) -> Interval:
        return Interval.of(self.speeds)

    @property
    def staleness(self) -> float:
        return _mean(outcome.staleness for outcome in self.outcomes)

    @property
    def longest_staleness(self) -> int:
        return max(outcome.longest_staleness for outcome in self.outcomes)

    @property
    def settled(self) -> bool:
        return all(outcome.settled for outcome in self.outcomes)

    @property
    def idle(self) -> float:
        return _mean(outcome.idle for outcome in self.outcomes)

    @property
    def parts(self) -> Mapping[str, float]:
        names = dict.fromkeys(name for outcome in self.outcomes for name in outcome.parts)
        shares = {name: _mean(each.parts.get(name, 0.0) for each in self.outcomes) for name in names}
        return dict(sorted(shares.items(), key=lambda part: -part[1]))

    @property
    def peak_tokens(self) -> float:
        return max(outcome.peak_tokens for outcome in self.outcomes)


def _mean(values: Iterable[float]) -> float:
    return float(np.mean(list(values)))


@dataclass(frozen=True, slots=True)
class Study:
    standings: Mapping[str, Standing]  # by name, in the order given
    baseline: str  # the schedule that the others are compared with
    cache: float = 0.0  # bytes of KV cache for a token of the actor; 0: unknown
    seeds: Sequence[int] = field(default=(0,))
    # why a schedule cannot be chosen, whatever it takes; by name
    refused: Mapping[str, str] = field(default_factory=dict)
    about: str = ""  # what is simulated

    def recommended(self, limit: float) -> str:
        """Return the name of the schedule to choose: the baseline's if no other is worth a change.

        It is the least stale one among those within 3% of the fastest, of all that can be chosen, whose mean staleness
        is at most ``limit``, and that are at least 5% faster than the baseline in all of their interval.
        """
        allowed = {name: each for name, each in self.standings.items() if not self._fault(name, limit)}
        if not allowed:
            return self.baseline
        fastest = max(each.speed.mean for each in allowed.values())
        close = [name for name, each in allowed.items() if each.speed.mean >= ALIKE * fastest]
        return min(close, key=lambda name: (round(allowed[name].staleness, 3), -allowed[name].speed.mean))

    def left_out(self, limit: float) -> Mapping[str, str]:
        chosen = self.recommended(limit)
        faster = [name for name, each in self.standings.items() if each.speed.mean > self.standings[chosen].speed.mean]
        alike = f"less than 3% faster than {chosen!r}, and staler"
        return {name: self._fault(name, limit) or alike for name in faster}

    def _fault(self, name: str, limit: float) -> str:
        each = self.standings[name]
        if name in self.refused:
            return self.refused[name]
        if each.staleness > limit + 1e-9:
            return f"its mean staleness of {each.staleness:.2f} updates is above --staleness {limit:g}"
        if each.speed.low < WORTHWHILE:
            return f"not 5% faster than {self.baseline!r} in all of its interval"
        return ""


def study(
    system: System,
    workload: Workload,
    schedules: Mapping[str, Schedule],
    *,
    baseline: str,
    steps: int | None = None,
    seeds: int | None = None,
    precise: bool = False,
) -> Study:
    """Simulate every schedule with the same seeds, in processes, until the intervals of the speeds are narrow.

    The first half of each run does not count, nor the further steps before it in which a controller that adapts
    settles. ``steps``, ``seeds``: of each run, and their number; ``None``: as many as the workload and ``precise`` ask
    for.
    """
    most, narrow = PRECISE if precise else DEFAULT
    rollouts = workload.batch * workload.samples
    least = steps or SETTLED
    steps = steps or max(STEPS[0], min(STEPS[1], A_RUN // rollouts))
    grain = 1 if precise else max(1, round(workload.cap / GRAINS * math.sqrt(rollouts / 512)))
    run = partial(_outcome, system, workload, steps=steps, settling=max(0, least - steps), grain=grain)
    outcomes: dict[str, list[ScheduleOutcome]] = {name: [] for name in schedules}
    limit = seeds or max(1, min(SEEDS, most // (steps * rollouts)))
    with _workers(len(schedules) * limit) as pool:
        while not (done := len(outcomes[baseline])) or (
            done < limit and (seeds or _widest(outcomes, baseline) > narrow)
        ):
            more = range(done, min(limit, done + (seeds or max(1, done))))
            logger.info(f"simulating {len(schedules)} schedules: {steps} steps, {more.stop} of at most {limit} seeds")
            made = {name: [pool.submit(run, each, seed=seed) for seed in more] for name, each in schedules.items()}
            for name, futures in made.items():
                outcomes[name] += [future.result() for future in futures]
    standings = {
        name: Standing(schedules[name], each, _speeds(outcomes, baseline, name)) for name, each in outcomes.items()
    }
    return Study(standings, baseline, system.cache, range(len(outcomes[baseline])))


def _speeds(outcomes: Mapping[str, Sequence[ScheduleOutcome]], baseline: str, name: str) -> list[float]:
    return [
        slow / fast
        for one, other in zip(outcomes[baseline], outcomes[name], strict=True)
        for slow, fast in zip(one.blocks, other.blocks, strict=True)
    ]


def _widest(outcomes: Mapping[str, Sequence[ScheduleOutcome]], baseline: str) -> float:
    # Half of the widest interval of a speed, as a share of it.
    speeds = [Interval.of(_speeds(outcomes, baseline, name)) for name in outcomes]
    return max((each.high - each.low) / 2 / each.mean for each in speeds)


def _outcome(
    system: System, workload: Workload, schedule: Schedule, /, *, steps: int, settling: int, grain: int, seed: int
) -> ScheduleOutcome:
    outcome = SimulatedRun(system, workload, schedule, steps, steps // 2, seed, grain, settling=settling).run()
    gc.collect()
    return outcome


@contextmanager
def _workers(jobs: int) -> Iterator[ProcessPoolExecutor]:
    # An error or a signal ends them at once.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent too, which ends its children
    threading.Thread(target=_follow_parent, daemon=True).start()
    gc.freeze()
    gc.disable()  # most objects live as long as a run, after which they are collected: on the way, for a fifth more


def _follow_parent() -> None:
    # Only this signals to a process that waits for work that its parent was killed.
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


WIDTH: Final = 120  # columns where the output is no terminal

LEGEND: Final = (
    "Speed is trained tokens a second, relative to {baseline!r} (*), with its 95% interval. Staleness is in updates, "
    "from a response's first token to its training. Idle is the share of the time in which the actor decodes nothing; "
    "in flight is what it decodes at once at the most, with its KV cache. A step is bound by what takes the largest "
    "share of it on the busiest device; of {baseline!r}: {parts}."
)
# What a part of a step is where its name does not say it
MEANINGS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "launching kernels": "a decode step waits for each layer's kernels to begin and end, however few rows it has: "
        "more rows at a time cost little, and a step's seconds follow its longest response",
        "floor and KV cache": "a decode step takes engine.floor_seconds at the least, however few rows it has",
        "weights": "a decode step waits until each weight has been read from memory: more rows at a time cost little",
    }
)


NOT_SIMULATED: Final = "not simulated: streamed updates (step.stream_updates), slope and tail-batched admissions"


def table(study: Study) -> Table:
    found = Table(show_edge=False, header_style="bold", pad_edge=False)
    found.add_column("schedule")
    in_flight = "GB in flight" if study.cache else "tokens in flight"
    for name in ("seconds a step", "speed", "mean staleness", "largest", "idle", in_flight):
        found.add_column(name, justify="right")
    for name, each in study.standings.items():
        marked = f"{name} *" if name == study.baseline else name
        found.add_row(marked if each.settled else f"{marked} (not settled)", *cells(study, each))
    return found


def legend(study: Study) -> str:
    width = max(map(len, study.standings))
    lines = [f"  {name:<{width}}  {_described(each)}" for name, each in study.standings.items()]
    parts = ", ".join(_bounds(study.standings[study.baseline]))
    named = dict.fromkeys(next(iter(each.parts), "") for each in study.standings.values())
    meanings = [f"Bound by {name}: {MEANINGS[name]}." for name in named if name in MEANINGS]
    return "\n".join([*lines, "", LEGEND.format(baseline=study.baseline, parts=parts), *meanings])


def _described(each: Standing) -> str:
    bound, said = next(_bounds(each), ""), each.schedule.about
    if not each.settled:
        before, last = np.mean([outcome.deferred for outcome in each.outcomes], axis=0)
        said += f" (not settled: {before:.0f}, then {last:.0f} in the last two quarters of a run; give more --steps)"
    return f"{said}; bound by {bound}" if bound else said


def _bounds(each: Standing) -> Iterator[str]:
    return (f"{name} {share:.0%}" for name, share in each.parts.items())


def cells(study: Study, each: Standing) -> Iterator[str]:
    yield rounded(each.seconds)
    yield ranged(each.speed)
    yield f"{each.staleness:.2f}"
    yield f"{each.longest_staleness}"
    yield f"{each.idle:.0%}"
    yield f"{each.peak_tokens * study.cache / 1e9:.1f}" if study.cache else f"{each.peak_tokens:,.0f}"


def rounded(value: float) -> str:
    return f"{value:.{3 if value < 1 else 2 if value < 100 else 0}f}"


def ranged(interval: Interval) -> str:
    mean, low, high = (f"{each:.2f}" for each in (interval.mean, interval.low, interval.high))
    return mean if low == high else f"{mean} ({low} - {high})"


def advice(study: Study, limit: float) -> str:
    name = study.recommended(limit)
    chosen = study.standings[name]
    if name == study.baseline:
        said = (
            f"leave it as it is: no schedule of a mean staleness of at most {limit:g} is 5% faster than {name!r} in "
            "all of its interval"
        )
    else:
        said = (
            f"choose {name!r} ({chosen.schedule.about}): {ranged(chosen.speed)} times as fast as {study.baseline!r}, "
            f"at a mean staleness of {chosen.staleness:.2f} updates, {chosen.longest_staleness} at most; what that "
            "costs in learning is not simulated (docs/schedules.md)"
        )
    faster = [
        f"  {other!r}, {ranged(study.standings[other].speed)} times as fast: {why}"
        for other, why in study.left_out(limit).items()
    ]
    left_out = ["", "faster, and left out:", *faster] if faster else []
    settings = [] if name == study.baseline else ["", f"the settings of {name!r}:", "", snippet(chosen.schedule)]
    return "\n".join([said, *left_out, "", *filter(None, [study.about]), NOT_SIMULATED, *settings])


def snippet(schedule: Schedule) -> str:
    return tomli_w.dumps({"step": dict(schedule.step)}).rstrip()


def as_json(study: Study, limit: float) -> str:
    schedules = {
        name: {
            "about": each.schedule.about,
            "step": dict(each.schedule.step),
            "seconds": each.seconds,
            "speed": asdict(each.speed),
            "staleness": each.staleness,
            "longest_staleness": each.longest_staleness,
            "idle": each.idle,
            "settled": each.settled,
            "parts": dict(each.parts),
            "tokens_in_flight": each.peak_tokens,
            "bytes_in_flight": each.peak_tokens * study.cache or None,
        }
        for name, each in study.standings.items()
    }
    facts = {
        "baseline": study.baseline,
        "recommended": study.recommended(limit),
        "left_out": dict(study.left_out(limit)),
        "seeds": list(study.seeds),
        "schedules": schedules,
    }
    return json.dumps(facts, indent=2) + "\n"
