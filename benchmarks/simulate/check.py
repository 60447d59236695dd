"""The simulator beside ``make bench``: calibrated on one mode of one result, checked on the other modes and results.

A result is calibrated on if it comes first. It and every further one of the same models is checked: each mode is
simulated in the measured rounds, on the lengths that the prompts of each step had, and its speed over ``serial`` is
compared with the measured one, both of them medians over pairs of rounds. Where ``serial`` was not measured, the mode
that is calibrated on takes its place. What the layouts do not share is stated by :func:`cores_of`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import accumulate, combinations, pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness import Spread
from benchmarks.ladder.pipeline import seats
from benchmarks.ladder.workloads import MODES, WORKLOADS, BenchWorkload, Layout, Mode
from oppo.admission import Observation
from oppo.admission.chunking import Fixed
from oppo.errors import DataError
from oppo.models import Passes
from oppo.simulate.calibrate import LAYOUTS, Contention, MeasuredStep, calibrated, measured_step
from oppo.simulate.profile import Reader, ScorerName, System, Updater, Workload
from oppo.simulate.schedule import Schedule, SimulatedRun

WITHIN: Final = 0.10  # the relative error of a ratio up to which the simulator is right

# Of what the records lack: the order of a step's prompts, and the lengths before and after the measured steps
SEEDS: Final = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Cores:
    score: float  # how much faster it is, with nothing beside it, than on the one core that it has in `split`
    train: float  # likewise
    contention: Contention  # of what runs side by side


SCORE_ON_TWO: Final = 1.65
# Speed on two cores over that on one, from the serial steps of results in both layouts on two machines, as means
TRAIN_ON_TWO: Final = 1.35

# How much longer work takes for each of two other kinds, if all three have a thread and share two cores
THREE_ON_TWO: Final = 0.25


def cores_of(layout: Layout, mode: Mode, *, apart: bool) -> Cores:
    """Return what the seats of a mode (:func:`benchmarks.ladder.pipeline.seats`) make of work; ``apart`` as there."""
    place = seats(layout, (0, 1), held=mode.held, apart=apart)
    contention = LAYOUTS[layout]
    if apart and layout == "split":
        contention = replace(contention, score_train=1.0)  # in turn, on the core of the scorers
    elif apart:
        contention = replace(contention, train=THREE_ON_TWO, score_train=THREE_ON_TWO)
    return Cores(
        score=SCORE_ON_TWO if place.scorers.threads > 1 else 1.0,
        train=TRAIN_ON_TWO if place.trainer.threads > 1 else 1.0,
        contention=contention,
    )


@dataclass(frozen=True, slots=True)
class LadderResult:
    """A file of results of ``make bench``, for a simulation."""

    workload: BenchWorkload
    layout: Layout
    models: Mapping[str, Any]
    # the measured steps of each mode, round by round, and the seconds of each
    rounds: Mapping[str, Sequence[Sequence[tuple[MeasuredStep, float]]]]
    warm_up: int  # steps before the first round

    @classmethod
    def read(cls, path: Path) -> list[LadderResult]:
        written = json.loads(path.read_text(encoding="utf-8"))
        return [cls.of(each, path) for each in (written if isinstance(written, list) else [written])]

    @classmethod
    def of(cls, written: Mapping[str, Any], path: Path) -> LadderResult:
        records, name = written.get("records"), str(written.get("workload"))
        if not records or name not in WORKLOADS:
            raise DataError(f"{path} lacks the records of steps of a workload: it was made by an older `make bench`")
        rounds = {mode: [[_step(step) for step in steps] for steps in each] for mode, each in records.items()}
        if (algorithm := WORKLOADS[name].algorithm) != "PPO":
            raise DataError(
                f"{path} is of workload {name}, whose steps are of {algorithm}: the simulated ones are PPO's"
            )
        plan, models = written["plan"], written["recipe"]["models"]
        return cls(WORKLOADS[name], written["layout"], models, rounds, plan["warm_up"])

    def layers(self, model: str) -> int:
        return int(self.models[model]["layers"])

    @property
    def trained_layers(self) -> int:
        """The depth of actor and critic together; they are equally wide."""
        return self.layers("actor") + self.layers("critic")

    def fits(self, other: LadderResult) -> bool:
        """Return whether the models are those of another result, but for the depth of reward model and critic."""

        def widths(result: LadderResult) -> Mapping[str, Any]:
            free = ("reward", "critic")
            return {name: {**each, "layers": None} if name in free else each for name, each in result.models.items()}

        return widths(self) == widths(other)

    def steps(self, mode: str) -> list[MeasuredStep]:
        return [step for steps in self.rounds[mode] for step, _ in steps]

    def lengths(self) -> list[Sequence[int]]:
        """Return the lengths of each step's responses, shortest first: from a mode that defers nothing."""
        whole = next((mode for mode in ("serial", "chunk", "rollout") if mode in self.rounds), None)
        if whole is None:
            raise DataError("a check needs a mode that defers nothing: serial, chunk or rollout")
        return [sorted(step.seen.finished) for step in self.steps(whole)]

    def per_token(self, mode: str) -> list[float]:
        return [sum(took for _, took in steps) / sum(step.tokens for step, _ in steps) for steps in self.rounds[mode]]

    def measured(self, mode: str, over: str) -> Spread:
        return Spread.of_ratios(self.per_token(over), self.per_token(mode))


def _step(record: Mapping[str, Any]) -> tuple[MeasuredStep, float]:
    metrics = {
        "trained": record["samples"],
        "response_length/tokens": record["tokens"],
        "timing_s/update": record["update"],
        "timing_s/weight_sync": record["weight_sync"],
    }
    return measured_step(Observation.from_json(record["observed"]), metrics, record["work"]), record["seconds"]


@dataclass(frozen=True, slots=True)
class Dealt:
    """The measured lengths of each step, and some of them again before and after."""

    steps: Sequence[Sequence[int]]  # the lengths by step, whose order within a step is unknown
    before: int  # number of prompts before the measured steps

    def __call__(self, units: int, samples: int, seed: int) -> NDArray[np.int64]:
        """Return the lengths of the responses to ``units`` prompts, int64 [units, samples], in tokens."""
        del samples
        random = np.random.default_rng(seed)
        known = np.concatenate([random.permutation(np.array(step, np.int64)) for step in self.steps])
        before = np.resize(random.permutation(known), self.before)
        after = np.resize(random.permutation(known), max(0, units - len(before) - len(known)))
        return np.concatenate([before, known, after])[:units, None]


@dataclass(frozen=True, slots=True)
class Ratio:
    """A mode's speed over that of the baseline, measured and simulated."""

    mode: str
    measured: Spread
    simulated: float

    @property
    def error(self) -> float:
        return self.simulated / self.measured.median - 1


@dataclass(frozen=True, slots=True)
class CheckedResult:
    workload: str
    layout: str
    over: str  # the baseline of the ratios
    ratios: Sequence[Ratio]
    # pairs of modes of which the simulation says the wrong one is faster, though measured ranges are disjoint
    wrong_order: Sequence[tuple[str, str]]

    @property
    def right(self) -> bool:
        """Whether every ratio is right within 10%, and the order wherever measured ranges are disjoint."""
        return all(abs(ratio.error) <= WITHIN for ratio in self.ratios) and not self.wrong_order

    def as_json(self) -> dict[str, object]:
        ratios = [{**asdict(each), "error": each.error} for each in self.ratios]
        return {**asdict(self), "ratios": ratios, "right": self.right}


def system_of(result: LadderResult, mode: str) -> System:
    """Return the system that one mode of a result is calibrated to, as it is in the layout ``split``."""
    if not all(step.reading for step in result.steps(mode)):
        raise DataError(f"some steps of mode {mode!r} do not say how long the models worked: measure them anew")
    cores, prompt = _cores(result, mode), sum(result.workload.prompt_tokens) / 2
    found = calibrated(result.steps(mode), prompt=prompt, contention=cores.contention)
    return _faster(found, 1 / cores.score, 1 / cores.train)


def adapted(system: System, of: LadderResult, to: LadderResult, mode: str) -> System:
    """Return a system for a mode of a result: another layout, number of epochs, or depth of models, no reward model."""
    cores = _cores(to, mode)
    work = (to.trained_layers * to.workload.epochs) / (of.trained_layers * of.workload.epochs)
    found = _faster(_deeper(system, of, to), cores.score, cores.train / work)
    if to.workload.reward == "rule":
        found = replace(found, readers={name: each for name, each in found.readers.items() if name != "reward"})
    return replace(found, interference=cores.contention)


def _deeper(system: System, of: LadderResult, to: LadderResult) -> System:
    """Return a system whose reward model and critic have the layers of another result; work is proportional to them."""

    def deeper(name: ScorerName, each: Reader) -> Reader:
        return each if name == "reference" else _sped(each, of.layers(name) / to.layers(name))

    return replace(system, readers={name: deeper(name, each) for name, each in system.readers.items()})


def _cores(result: LadderResult, mode: str) -> Cores:
    return cores_of(result.layout, MODES[mode], apart=MODES[mode].trains_apart(result.workload))


def _faster(system: System, score: float, train: float) -> System:
    updater: Updater = replace(
        system.updater, passes=_scaled(system.updater.passes, train), fixed=system.updater.fixed / train
    )
    readers = {name: _sped(each, score) for name, each in system.readers.items()}
    return replace(system, readers=readers, updater=updater)


def _sped(reader: Reader, speed: float) -> Reader:
    passes = _scaled(reader.passes, speed)
    return replace(reader, passes=passes, call=reader.call / speed, answer=reader.answer / speed)


def _scaled(passes: Passes, speed: float) -> Passes:
    return Passes(token=passes.token / speed, pair=passes.pair / speed)


def simulated(system: System, result: LadderResult, mode: str) -> list[float]:
    """Return the simulated seconds for each trained token of a mode, round by round, with each seed.

    Rounds are those that were measured: no step is in flight between two of them.
    """
    return [each for seed in SEEDS for each in _simulated(system, result, mode, seed)]


def _simulated(system: System, result: LadderResult, mode: str, seed: int) -> list[float]:
    chosen, bench, lengths = MODES[mode], result.workload, result.lengths()
    workload = Workload(
        batch=bench.batch,
        lengths=Dealt(lengths, result.warm_up * bench.batch),
        cap=bench.lengths.cap,
        prompt=round(sum(bench.prompt_tokens) / 2),
    )
    bounds = list(accumulate(map(len, result.rounds[mode]), initial=result.warm_up))
    drained = {bound - 1 for bound in bounds}
    run = SimulatedRun(
        system, workload, schedule_of(chosen, bench), bounds[-1], result.warm_up, seed, drain_after=drained
    )
    run.run()
    return [
        (run.ended[stop - 1].ended - run.ended[start - 1].ended) / sum(each.tokens for each in run.ended[start:stop])
        for start, stop in pairwise(bounds)
    ]


def schedule_of(mode: Mode, workload: BenchWorkload) -> Schedule:
    chunks = mode.chunks(workload)
    return Schedule(
        name=mode.name,
        about=mode.about,
        admission=partial(mode.admission, workload),
        chunk=chunks.tokens if isinstance(chunks, Fixed) else None,
        held=mode.held,
        lookahead=mode.lookahead,
    )


def check(results: Sequence[LadderResult], on: str) -> Iterator[CheckedResult]:
    """Yield every result that fits the first, checked by a system that one mode of the first gives."""
    source = results[0]
    if on not in source.rounds:
        raise DataError(f"the first result has no mode {on!r} to calibrate on; it has {', '.join(source.rounds)}")
    if source.workload.reward == "rule" and any(result.workload.reward == "model" for result in results):
        raise DataError(
            f"{source.workload.name} has no reward model, so a calibration on it does not say what one costs: name a "
            "result with one first"
        )
    system = system_of(source, on)
    for result in results:
        over = "serial" if "serial" in result.rounds else on
        modes = [mode for mode in result.rounds if mode != over]
        if not result.fits(source) or over not in result.rounds or not modes:
            continue
        took = {mode: simulated(adapted(system, source, result, mode), result, mode) for mode in result.rounds}
        ratios = [
            Ratio(mode, result.measured(mode, over), Spread.of_ratios(took[over], took[mode]).median) for mode in modes
        ]
        yield CheckedResult(result.workload.name, result.layout, over, ratios, wrong_order(ratios))


def wrong_order(ratios: Sequence[Ratio]) -> list[tuple[str, str]]:
    """Return the pairs with disjoint measured ranges that the simulation has the other way round, the slower first."""
    found = []
    for one, other in combinations(ratios, 2):
        slow, fast = sorted((one, other), key=lambda each: each.measured.median)
        if slow.measured.high < fast.measured.low and slow.simulated >= fast.simulated:
            found.append((slow.mode, fast.mode))
    return found
