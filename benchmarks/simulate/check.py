"""The simulator beside ``make bench``: calibrated on one mode of one result, checked on the other modes and results.

A result is calibrated on if it comes first. It and every further one of the same models is checked: each mode is
simulated on the prompts that the result's steps had, and its speed over ``serial`` is compared with the measured one,
the median over interleaved rounds. What the layouts do not share is stated in :data:`CORES`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.ladder.measures import Spread
from benchmarks.ladder.modes import MODES
from benchmarks.ladder.workloads import WORKLOADS, Layout, Workload as BenchWorkload
from oppo.admission import Observation
from oppo.chunking import Fixed
from oppo.errors import DataError
from oppo.simulate.calibrate import LAYOUTS, MeasuredStep, calibrated
from oppo.simulate.course import Course
from oppo.simulate.outcome import LAST
from oppo.simulate.records import measured_step
from oppo.simulate.schedules import Schedule
from oppo.simulate.system import Passes, Reader, System, Updater, Workload

WITHIN: Final = 0.10
"""The relative error of a ratio up to which the simulator is right."""

SEEDS: Final = (0, 1, 2)
"""Orders in which the measured prompts are dealt before and after their own time."""

WARM_UP: Final = 4
"""Simulated steps before those that are compared."""


@dataclass(frozen=True, slots=True)
class Cores:
    """How much faster work is in a layout than in ``split``, where it has one core.

    Attributes:
        score: with nothing beside it.
        train: likewise.
    """

    score: float
    train: float


CORES: Final[Mapping[Layout, Cores]] = {"split": Cores(1.0, 1.0), "shared": Cores(1.65, 1.26)}
"""From the serial steps of the results of record of three workloads in both layouts (geometric means)."""


@dataclass(frozen=True, slots=True)
class Result:
    """A file of results of ``make bench``, for a simulation.

    Attributes:
        rounds: the measured steps of each mode, round by round, and the seconds of each.
    """

    workload: BenchWorkload
    layout: Layout
    models: Mapping[str, Any]
    rounds: Mapping[str, Sequence[Sequence[tuple[MeasuredStep, float]]]]

    @classmethod
    def read(cls, path: Path) -> list[Result]:
        """Return the results in a file.

        Raises:
            DataError: they lack what a simulation needs.
        """
        written = json.loads(path.read_text(encoding="utf-8"))
        return [cls.of(each, path) for each in (written if isinstance(written, list) else [written])]

    @classmethod
    def of(cls, written: Mapping[str, Any], path: Path) -> Result:
        """Return one result."""
        records, name = written.get("records"), str(written.get("workload"))
        if not records or name not in WORKLOADS:
            raise DataError(f"{path} lacks the records of steps of a workload: it was made by an older `make bench`")
        rounds = {mode: [[_step(step) for step in steps] for steps in each] for mode, each in records.items()}
        return cls(WORKLOADS[name], written["layout"], written["recipe"]["models"], rounds)

    def steps(self, mode: str) -> list[MeasuredStep]:
        """Return the measured steps of a mode."""
        return [step for steps in self.rounds[mode] for step, _ in steps]

    def lengths(self) -> list[int]:
        """Return the lengths of the responses in the order of the prompts: from a mode that carries nothing over."""
        whole = next((mode for mode in ("serial", "chunk", "rollout") if mode in self.rounds), None)
        if whole is None:
            raise DataError("a check needs a mode that carries nothing over: serial, chunk or rollout")
        return [length for step in self.steps(whole) for length in step.seen.finished]

    def per_token(self, mode: str) -> list[float]:
        """Return the seconds for each trained token, round by round."""
        return [sum(took for _, took in steps) / sum(step.tokens for step, _ in steps) for steps in self.rounds[mode]]

    def measured(self, mode: str) -> Spread:
        """Return the speed of a mode over that of ``serial``, by pairs of rounds."""
        return Spread.of(
            theirs / ours for ours, theirs in zip(self.per_token(mode), self.per_token("serial"), strict=True)
        )


def _step(record: Mapping[str, Any]) -> tuple[MeasuredStep, float]:
    metrics = {
        "trained": record["samples"],
        "response_length/tokens": record["tokens"],
        "timing_s/update": record["update"],
        "timing_s/publish": record["publish"],
    }
    return measured_step(Observation.from_json(record["observed"]), metrics, record["work"]), record["seconds"]


@dataclass(frozen=True, slots=True)
class Dealt:
    """The measured lengths in the order of the prompts, between others of them: of warm-up, and of the last steps.

    Attributes:
        before: responses of the steps that warm up.
    """

    lengths: Sequence[int]
    before: int

    def __call__(self, units: int, samples: int, seed: int) -> NDArray[np.int64]:
        """Return the lengths of the responses to ``units`` prompts, int64 [units, samples], in tokens."""
        del samples
        random, known = np.random.default_rng(seed), np.array(self.lengths, np.int64)
        first = np.resize(random.permutation(known), self.before)
        rest = np.resize(random.permutation(known), max(0, units - self.before - len(known)))
        return np.concatenate([first, known, rest])[:units, None]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A mode's speed over that of ``serial``, measured and simulated."""

    mode: str
    measured: Spread
    simulated: float

    @property
    def error(self) -> float:
        """The relative error of the simulation."""
        return self.simulated / self.measured.median - 1


@dataclass(frozen=True, slots=True)
class Checked:
    """One result, checked.

    Attributes:
        wrong_order: pairs of modes of which the simulation says the wrong one is faster, though measured ranges are
            disjoint.
    """

    workload: str
    layout: str
    ratios: Sequence[Ratio]
    wrong_order: Sequence[tuple[str, str]]

    @property
    def right(self) -> bool:
        """Whether every ratio is right within 10 %, and the order wherever measured ranges are disjoint."""
        return all(abs(ratio.error) <= WITHIN for ratio in self.ratios) and not self.wrong_order

    def as_json(self) -> dict[str, object]:
        """Return this as JSON values."""
        ratios = [{**asdict(each), "error": each.error} for each in self.ratios]
        return {**asdict(self), "ratios": ratios, "right": self.right}


def system_of(result: Result, mode: str) -> System:
    """Return the system that one mode of a result is calibrated to, as it is in the layout ``split``."""
    contention, cores = LAYOUTS[result.layout], CORES[result.layout]
    prompt = sum(result.workload.prompt_tokens) / 2
    return _faster(
        calibrated(result.steps(mode), prompt=prompt, contention=contention), 1 / cores.score, 1 / cores.train
    )


def adapted(system: System, of: Result, to: Result) -> System:
    """Return a system for another layout, another number of epochs, or without a reward model."""
    cores = CORES[to.layout]
    found = _faster(system, cores.score, cores.train * of.workload.epochs / to.workload.epochs)
    if to.workload.reward == "rule":
        found = replace(found, readers={name: each for name, each in found.readers.items() if name != "reward"})
    return replace(found, interference=LAYOUTS[to.layout])


def _faster(system: System, score: float, train: float) -> System:
    def reader(each: Reader) -> Reader:
        return replace(each, passes=_scaled(each.passes, score), call=each.call / score, answer=each.answer / score)

    updater: Updater = replace(
        system.updater, passes=_scaled(system.updater.passes, train), fixed=system.updater.fixed / train
    )
    return replace(system, readers={name: reader(each) for name, each in system.readers.items()}, updater=updater)


def _scaled(passes: Passes, speed: float) -> Passes:
    return Passes(token=passes.token / speed, pair=passes.pair / speed)


def simulated(system: System, result: Result, mode: str) -> float:
    """Return the simulated seconds for each trained token of a mode, on the prompts that the result's steps had."""
    chosen, bench, lengths = MODES[mode], result.workload, result.lengths()
    chunks = chosen.chunks(bench)
    schedule = Schedule(
        name=mode,
        about=chosen.about,
        admission=lambda: chosen.admission(bench),
        chunk=chunks.tokens if isinstance(chunks, Fixed) else None,
        held=chosen.held,
    )
    workload = Workload(
        batch=bench.batch,
        lengths=Dealt(lengths, WARM_UP * bench.batch),
        cap=bench.lengths.cap,
        prompt=round(sum(bench.prompt_tokens) / 2),
    )
    steps = max(1, len(lengths) // bench.batch) + WARM_UP + LAST
    return float(
        np.mean([Course(system, workload, schedule, steps, WARM_UP, seed, 1).run().per_token for seed in SEEDS])
    )


def check(results: Sequence[Result], on: str) -> Iterator[Checked]:
    """Yield every result that has the models of the first, checked by a system that one mode of the first gives.

    Raises:
        DataError: the first result lacks that mode.
    """
    source = results[0]
    if on not in source.rounds:
        raise DataError(f"the first result has no mode {on!r} to calibrate on; it has {', '.join(source.rounds)}")
    system = system_of(source, on)
    for result in results:
        if result.models != source.models or "serial" not in result.rounds:
            continue
        there = adapted(system, source, result)
        speeds = {mode: 1 / simulated(there, result, mode) for mode in result.rounds}
        modes = [mode for mode in result.rounds if mode != "serial"]
        ratios = [Ratio(mode, result.measured(mode), speeds[mode] / speeds["serial"]) for mode in modes]
        yield Checked(result.workload.name, result.layout, ratios, wrong_order(ratios))


def wrong_order(ratios: Sequence[Ratio]) -> list[tuple[str, str]]:
    """Return the pairs with disjoint measured ranges that the simulation has the other way round, the slower first."""
    found = []
    for one, other in combinations(ratios, 2):
        slow, fast = sorted((one, other), key=lambda each: each.measured.median)
        if slow.measured.high < fast.measured.low and slow.simulated >= fast.simulated:
            found.append((slow.mode, fast.mode))
    return found
