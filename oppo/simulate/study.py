"""Compares schedules of one workload, each run with the same seeds, and recommends one in words."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import active_children, get_context, parent_process
from typing import Final

import tomli_w
from rich.table import Table

from oppo.log import logger
from oppo.simulate.costs import System, Workload
from oppo.simulate.run import LAST, Schedule, ScheduleOutcome, SimulatedRun

WORTHWHILE: Final = 1.05  # the least speed-up over the present schedule that is worth a change

ALIKE: Final = 0.97  # of schedules within 3 % of the fastest, the one with the least staleness is recommended

FEWEST: Final = 3  # the fewest seeds for a recommendation: with fewer, chance decides

WARM: Final = 4  # every so-many-th of the steps does not count: those in which a schedule fills its buffers


@dataclass(frozen=True, slots=True)
class Spread:
    # Over seeds. The range of n seeds holds the median of any further ones with probability 1 - 2^(1 - n).
    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        sample = list(values)
        return cls(sum(sample) / len(sample), min(sample), max(sample))


@dataclass(frozen=True, slots=True)
class Standing:
    """One schedule in a study; ``speeds``: trained tokens a second over the baseline's, by seed."""

    schedule: Schedule
    outcomes: Sequence[ScheduleOutcome]
    speeds: Sequence[float]

    @property
    def seconds(self) -> Spread:
        return Spread.of(outcome.seconds for outcome in self.outcomes)

    @property
    def speed(self) -> Spread:
        return Spread.of(self.speeds)

    @property
    def staleness(self) -> float:
        return Spread.of(outcome.staleness for outcome in self.outcomes).mean

    @property
    def longest_staleness(self) -> int:
        return max(outcome.longest_staleness for outcome in self.outcomes)

    @property
    def idle(self) -> float:
        return Spread.of(outcome.idle for outcome in self.outcomes).mean

    @property
    def parts(self) -> Mapping[str, float]:
        names = dict.fromkeys(name for outcome in self.outcomes for name in outcome.parts)
        shares = {name: Spread.of(each.parts.get(name, 0.0) for each in self.outcomes).mean for name in names}
        return dict(sorted(shares.items(), key=lambda part: -part[1]))

    @property
    def peak_tokens(self) -> float:
        return max(outcome.peak_tokens for outcome in self.outcomes)


@dataclass(frozen=True, slots=True)
class Study:
    standings: Mapping[str, Standing]  # by name, in the order given
    baseline: str  # the schedule that the others are compared with
    cache: float = 0.0  # bytes of KV cache for a token of the actor; 0: unknown
    seeds: Sequence[int] = field(default=(0,))
    # why a schedule cannot be chosen, whatever it takes; by name
    refused: Mapping[str, str] = field(default_factory=dict)

    def recommended(self, limit: float) -> str:
        """Return the name of the schedule to choose: the baseline's if no other is worth a change.

        It is the least stale one among those within 3 % of the fastest, of all that can be chosen, whose mean staleness
        is at most ``limit``, and that are at least 5 % faster than the baseline with every seed.
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
        alike = f"less than 3 % faster than {chosen!r}, and staler"
        return {name: self._fault(name, limit) or alike for name in faster}

    def _fault(self, name: str, limit: float) -> str:
        each = self.standings[name]
        if name in self.refused:
            return self.refused[name]
        if each.staleness > limit + 1e-9:
            return f"its mean staleness of {each.staleness:.2f} updates is above --staleness {limit:g}"
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
) -> Study:
    """Simulate every schedule with every seed, in processes; the first quarter of the steps does not count."""
    outcomes: dict[str, list[ScheduleOutcome]] = {}
    with _workers(len(schedules) * len(seeds)) as pool:
        made = {
            name: [pool.submit(_outcome, system, workload, each, steps, seed) for seed in seeds]
            for name, each in schedules.items()
        }
        for name, futures in made.items():
            logger.info(f"simulating {name}: {steps} steps, {len(seeds)} seeds")
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
    gc.set_threshold(50_000, 20, 20)  # a run's tasks live for a step: collecting often finds nothing, at a tenth more


def _follow_parent() -> None:
    # Only this signals to a process that waits for work that its parent was killed.
    parent = parent_process()
    if parent is not None:
        parent.join()
    os._exit(1)


WIDTH: Final = 120  # columns where the output is no terminal

LEGEND: Final = (
    "Speed is trained tokens a second, relative to {baseline!r} (*); ranges are over seeds. Staleness is in updates, "
    "from a response's first token to its training. Idle is the share of the time in which the actor decodes nothing; "
    "in flight is what it decodes at once at the most, with its KV cache. A step is bound by what takes the largest "
    "share of it on the busiest device; of {baseline!r}: {parts}."
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
        found.add_row(marked, *cells(study, each))
    return found


def legend(study: Study) -> str:
    width = max(map(len, study.standings))
    lines = [f"  {name:<{width}}  {_described(each)}" for name, each in study.standings.items()]
    parts = ", ".join(_bounds(study.standings[study.baseline]))
    return "\n".join([*lines, "", LEGEND.format(baseline=study.baseline, parts=parts)])


def _described(each: Standing) -> str:
    bound = next(_bounds(each), "")
    return f"{each.schedule.about}; bound by {bound}" if bound else each.schedule.about


def _bounds(each: Standing) -> Iterator[str]:
    return (f"{name} {_percent(share)}" for name, share in each.parts.items())


def _percent(share: float) -> str:
    return f"{share:.0%}".replace("%", " %")


def cells(study: Study, each: Standing) -> Iterator[str]:
    yield ranged(each.seconds)
    yield ranged(each.speed)
    yield f"{each.staleness:.2f}"
    yield f"{each.longest_staleness}"
    yield _percent(each.idle)
    yield f"{each.peak_tokens * study.cache / 1e9:.1f}" if study.cache else f"{each.peak_tokens:,.0f}"


def ranged(spread: Spread) -> str:
    digits = 3 if spread.mean < 1 else 2 if spread.mean < 100 else 0
    if spread.low == spread.high:
        return f"{spread.mean:.{digits}f}"
    return f"{spread.mean:.{digits}f} ({spread.low:.{digits}f} - {spread.high:.{digits}f})"


def advice(study: Study, limit: float) -> str:
    if len(study.seeds) < FEWEST:
        return f"{len(study.seeds)} seeds are too few to recommend a schedule: give --seeds {FEWEST} or more"
    name = study.recommended(limit)
    chosen = study.standings[name]
    seeds = f"over {len(study.seeds)} seeds"
    if name == study.baseline:
        said = (
            f"leave it as it is: no schedule of a mean staleness of at most {limit:g} is 5 % faster than {name!r} with "
            f"every seed ({seeds})"
        )
    else:
        said = (
            f"choose {name!r} ({chosen.schedule.about}): {ranged(chosen.speed)} times as fast as {study.baseline!r} "
            f"{seeds}, at a mean staleness of {chosen.staleness:.2f} updates, {chosen.longest_staleness} at most; what "
            "that costs in learning is not simulated (docs/schedules.md)"
        )
    faster = [
        f"  {other!r}, {ranged(study.standings[other].speed)} times as fast: {why}"
        for other, why in study.left_out(limit).items()
    ]
    left_out = ["", "faster, and left out:", *faster] if faster else []
    settings = [] if name == study.baseline else ["", f"the settings of {name!r}:", "", snippet(chosen.schedule)]
    return "\n".join([said, *left_out, "", NOT_SIMULATED, *settings])


def snippet(schedule: Schedule) -> str:
    return tomli_w.dumps({"step": dict(schedule.step)}).rstrip()


def as_json(study: Study, limit: float) -> str:
    schedules = {
        name: {
            "about": each.schedule.about,
            "step": dict(each.schedule.step),
            "seconds": asdict(each.seconds),
            "speed": asdict(each.speed),
            "staleness": each.staleness,
            "longest_staleness": each.longest_staleness,
            "idle": each.idle,
            "parts": dict(each.parts),
            "tokens_in_flight": each.peak_tokens,
            "bytes_in_flight": each.peak_tokens * study.cache or None,
        }
        for name, each in study.standings.items()
    }
    facts = {
        "baseline": study.baseline,
        "recommended": study.recommended(limit) if len(study.seeds) >= FEWEST else None,
        "left_out": dict(study.left_out(limit)),
        "seeds": list(study.seeds),
        "schedules": schedules,
    }
    return json.dumps(facts, indent=2) + "\n"
