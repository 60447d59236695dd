"""Calibration: the costs of a system, fitted to the measured steps in a run directory.

Decode steps are fitted to the stretches of the steps' decode phases, which differ in how many rows are live, how long
they are and how many end; reading to the scorers' calls and tokens; the update to its tokens. The actor reads a prompt
at the reference's cost, as it is the same model: a phase reads its prompts at once, which shows little of their cost.
Concurrent work slows each other down. One run cannot separate this from the work's own cost: :class:`Contention`
states it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, cast

import numpy as np
from numpy.typing import NDArray

from oppo.admission import Observation, Scoring
from oppo.errors import ConfigError, DataError, one_line
from oppo.models import Passes
from oppo.redact import excerpt
from oppo.report.metrics import in_own_names
from oppo.report.records import JOURNAL, METRICS, WORK, Record, Work, ended, observations, read
from oppo.simulate.profile import STAGES, Decoder, Observed, Reader, ScorerName, System, Updater

FloatArray64 = NDArray[np.float64]

ROUNDS: Final = 8  # times that measurements are weighed anew: those far from the fit count less

# Typical deviations beyond which a measurement counts in proportion to its distance, not its square (Huber 1964)
FAR: Final = 2.0

# Weight of the prior that all terms share the seconds alike; it decides only what the measurements leave open
SPREAD: Final = 1e-3


def fitted(work: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Return the cost of each kind of work: ``seconds = sum over kinds of cost * amount``, no cost below 0.

    A kind with no work costs nothing. Deviations are weighed by the square root of the seconds, as for a sum of
    independent ones; outliers count less; half of the measurements exceed the fit.

    Example:
        >>> [round(cost, 6) for cost in fitted([[1, 0], [1, 2], [1, 5]], [1.0, 2.0, 3.5])]
        [1.0, 0.5]
    """
    amounts, took = np.asarray(work, np.float64), np.asarray(seconds, np.float64)
    kinds = amounts.shape[1] if amounts.ndim == 2 else 0
    useful = took > 0
    amounts, took = amounts[useful] if len(took) else amounts, took[useful]
    if not len(took) or not kinds:
        return [0.0] * kinds
    scale = np.where(amounts.mean(0) > 0, amounts.mean(0), 1.0)
    inputs, unit = amounts / scale, took.mean()
    weights = 1 / np.sqrt(took / unit)
    shares = np.zeros(kinds)
    for _ in range(ROUNDS):
        shares = _least_squares(inputs, took / unit, weights)
        off = np.abs(inputs @ shares - took / unit) / np.sqrt(took / unit)
        typical = max(float(np.median(off)), 1e-9)
        weights = np.minimum(1.0, FAR * typical / np.maximum(off, 1e-12)) ** 0.5 / np.sqrt(took / unit)
    costs = shares * unit / scale
    costs *= _weighted_median(took / np.maximum(amounts @ costs, 1e-12), amounts @ costs)
    return [float(cost) for cost in costs]


def _weighted_median(values: FloatArray64, weights: FloatArray64) -> float:
    order = np.argsort(values)
    reached = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(reached, reached[-1] / 2)]) if reached[-1] > 0 else 1.0


def _least_squares(inputs: FloatArray64, outputs: FloatArray64, weights: FloatArray64) -> FloatArray64:
    # The kinds are few, so every choice of them is tried.
    kinds = inputs.shape[1]
    prior = 1 / kinds
    best, least = np.zeros(kinds), np.inf
    for chosen in _choices(np.flatnonzero(inputs.any(0)).tolist()):
        columns = list(chosen)
        x = inputs[:, columns] * weights[:, None]
        y = outputs * weights
        ridge = SPREAD * np.eye(len(columns))
        found = prior + np.linalg.solve(x.T @ x + ridge, x.T @ (y - x.sum(1) * prior))
        if (found < 0).any():
            continue
        error = float(((x @ found - y) ** 2).sum() + SPREAD * ((found - prior) ** 2).sum())
        if error < least:
            best, least = np.zeros(kinds), error
            best[columns] = found
    return best


def _choices(kinds: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for size in range(len(kinds), 0, -1):
        yield from combinations(kinds, size)


WARM_UP: Final = 2  # first steps that are left out of longer runs: nothing is warm in them

LEAST: Final = 4  # the fewest steps to calibrate on

DEVICE: Final = "machine"  # all work is on one virtual device, on which each kind slows the others down as is stated


@dataclass(frozen=True, slots=True, kw_only=True)
class Contention:
    """The slowdown of one kind of work beside another, as a share; measured, not fitted."""

    decode: float
    score: float
    train: float
    score_train: float

    def __call__(self, kind: str, other: str) -> float:
        if "train" in {kind, other}:
            return self.train if "decode" in {kind, other} else self.score_train
        return self.decode if kind == "decode" else self.score


# `split`: each side has cores, or a device, of its own. `shared`: they share them. Of two machines with two cores
# (`benchmarks/results`), with nothing deferred: decoding beside scoring takes 1.02 to 1.16 times as long in `split` and
# 1.07 to 1.19 times in `shared`, where each has one thread. Training on all cores takes turns with what works there
LAYOUTS: Final[Mapping[str, Contention]] = MappingProxyType(
    {
        "split": Contention(decode=0.08, score=0.0, train=0.05, score_train=0.05),
        "shared": Contention(decode=0.12, score=0.12, train=1.0, score_train=1.0),
    }
)


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    seen: Observation
    trained: int  # rollouts in its batch
    tokens: int  # response tokens in the batch
    # update, weight_sync: seconds
    update: float
    weight_sync: float
    # reading, answering: seconds in which each scorer read and answered, by stage, without the wait for others in its
    # place; a scorer that is not named took as long as its calls did
    reading: Mapping[str, float] = field(default_factory=dict)
    answering: Mapping[str, float] = field(default_factory=dict)


def calibrated(
    steps: Sequence[MeasuredStep], *, prompt: float, contention: Contention, recomputes: bool = True
) -> System:
    # `contention`: of the layout in which the steps were measured and the system is simulated.
    known = [step for step in steps if step.seen.stretches and step.trained]
    if len(known) < LEAST:
        raise DataError(
            f"{len(known)} of {len(steps)} steps say what their decode steps were; a calibration needs {LEAST}: run "
            "some more, with this version of oppo"
        )
    known = known[WARM_UP:] if len(known) >= LEAST + WARM_UP else known
    readers = _readers(known, contention)
    reading = readers["reference"].passes if "reference" in readers else None
    return System(
        decoder=_decoder(known, contention, reading, recomputes=recomputes),
        readers=readers,
        updater=_updater(known, prompt, contention),
        interference=contention,
    )


def _decoder(
    steps: Sequence[MeasuredStep], contention: Contention, reading: Passes | None, *, recomputes: bool
) -> Decoder:
    # `reading`: the cost of reading prompts; `None`: it is fitted too.
    known = 0.0 if reading is None else reading.token
    work, seconds = [], []
    for step in steps:
        share = _beside(step)[0] / step.seen.decode_seconds if step.seen.decode_seconds > 0 else 0.0
        for each in step.seen.stretches:
            read = each.opened + (each.resumed if recomputes else 0)
            ended = each.ended or len(step.seen.finished) / len(step.seen.stretches)  # older journals do not say
            unknown = read if reading is None else 0
            work.append((float(each.steps), float(each.tokens), float(each.context), float(ended), float(unknown)))
            seconds.append(each.seconds / (1 + contention.decode * share) - known * read)
    per_step, row, context, ending, token = fitted(work, seconds)
    return Decoder(
        step=per_step,
        row=row,
        context=context,
        ending=ending,
        prefill=Passes(token=known or token),
        recomputes=recomputes,
        device=DEVICE,
    )


def _beside(step: MeasuredStep) -> tuple[float, float]:
    busy = [(_shares(each), _reading(step, each) + _answering(step, each)) for each in step.seen.scoring]
    decoding, training = (sum(shares[k] * seconds for shares, seconds in busy) for k in range(2))
    return min(decoding, step.seen.decode_seconds), min(training, step.update)


def _shares(times: Scoring) -> tuple[float, float]:
    work = times.busy + times.spare
    return (times.before / work, times.spare / work) if work > 0 else (0.0, 0.0)


def _alone(times: Scoring, contention: Contention) -> float:
    # The share that the work would have taken with nothing beside it.
    decoding, training = _shares(times)
    return decoding / (1 + contention.score) + training / (1 + contention.score_train) + 1 - decoding - training


def _reading(step: MeasuredStep, times: Scoring) -> float:
    return step.reading.get(times.stage, times.busy + times.spare - times.answering)


def _answering(step: MeasuredStep, times: Scoring) -> float:
    return step.answering.get(times.stage, times.answering)


def _readers(steps: Sequence[MeasuredStep], contention: Contention) -> dict[ScorerName, Reader]:
    found: dict[ScorerName, Reader] = {}
    for role, stage in STAGES.items():
        times = [(step, each) for step in steps for each in step.seen.scoring if each.stage == stage]
        if not times:
            continue
        alone = [_alone(each, contention) for _, each in times]
        work = [(float(each.calls), float(each.tokens)) for _, each in times]
        reading = [share * _reading(*each) for share, each in zip(alone, times, strict=True)]
        call, token = fitted(work, reading)
        answering = [share * _answering(*each) for share, each in zip(alone, times, strict=True)]
        answered = sum(each.answered for _, each in times)
        found[role] = Reader(
            passes=Passes(token=token), call=call, answer=sum(answering) / max(1, answered), device=DEVICE
        )
    return found


def _updater(steps: Sequence[MeasuredStep], prompt: float, contention: Contention) -> Updater:
    lost = contention.score_train / (1 + contention.score_train)
    seconds = [step.update - lost * _beside(step)[1] for step in steps]
    fixed, token = fitted([(1.0, step.tokens + prompt * step.trained) for step in steps], seconds)
    alone = [step for step in steps if not step.seen.lookahead]
    others = [max(0.0, step.seen.rest_seconds - step.update - step.weight_sync) for step in alone]
    return Updater(
        passes=Passes(token=token),
        fixed=fixed + (float(np.median(others)) if others else 0.0),
        weight_sync=float(np.median([step.weight_sync for step in steps])),
        device=DEVICE,
    )


NEEDED = ("timing_s/update", "timing_s/weight_sync", "trained")  # metrics without which a step cannot be calibrated on

# The stage of each scorer by the track of its model
TRACKS: Final[Mapping[str, str]] = MappingProxyType(
    {"reward model": "reward", **{str(name): stage for name, stage in STAGES.items()}}
)

NOTHING: Final = [0, 0.0]  # no call, and no second


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The records of a run directory; ``lengths``: of the responses, by group."""

    steps: Sequence[MeasuredStep]
    prompt: float
    lengths: Observed
    cap: int

    @classmethod
    def read(cls, directory: Path) -> RunRecord:
        # Raises ConfigError without a finished run, DataError where its records lack something.
        if not (directory / METRICS).is_file():
            raise ConfigError(f"there is no run in {directory}: expected the file {directory / METRICS}")
        if ended(directory) is None:
            raise ConfigError(
                f"the run in {directory} has not finished, and a simulation is calibrated on a finished one: go on "
                f"with `oppo resume {directory}`"
            )
        try:
            return cls._of(directory)
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise DataError(f"the records in {directory} cannot be used: {one_line(error)}") from error

    @classmethod
    def _of(cls, directory: Path) -> RunRecord:
        seen = observations(directory / JOURNAL)
        metrics: dict[int, Mapping[str, Any]] = {
            cast("int", each["step"]): in_own_names(each) for each in read(directory / METRICS, _refuse)
        }
        if any(each.get("selection/rounds", 1) != 1 for each in metrics.values()):
            raise ConfigError(
                f"the run in {directory} replaces rejected groups, which a simulation does not know yet: give a run "
                "with algorithm.dynamic_sampling = false"
            )
        work = {
            cast("int", each["step"]): cast("Any", each.get("models", {})) for each in read(directory / WORK, _refuse)
        }
        steps = [
            measured_step(seen[step], each, work.get(step, {}))
            for step, each in sorted(metrics.items())
            if step in seen and all(each.get(name) is not None for name in NEEDED)
        ]
        journal = list(read(directory / JOURNAL, _refuse))
        prompts = [cast("int", each["prompt_tokens"]) for each in journal if each.get("event") == "admitted"]
        groups = lengths_of(journal)
        if not (steps and prompts and groups):
            raise DataError(
                f"{directory / JOURNAL} says nothing of the run's steps or rollouts: it is of another program"
            )
        longest = max(max(group) for group in groups)
        return cls(steps, sum(prompts) / len(prompts), Observed(groups), longest)


def _refuse(number: int, line: bytes) -> None:
    raise ValueError(f"line {number}, {excerpt(line.decode(errors='replace'), 80)!r}, is no record of theirs")


def measured_step(seen: Observation, metrics: Mapping[str, Any], work: Work) -> MeasuredStep:
    models = {stage: work[track] for track, stage in TRACKS.items() if track in work}
    return MeasuredStep(
        seen,
        trained=int(metrics["trained"]),
        tokens=int(metrics.get("response_length/tokens") or 0),
        update=float(metrics["timing_s/update"]),
        weight_sync=float(metrics["timing_s/weight_sync"]),
        reading={stage: labels.get("extend", NOTHING)[1] for stage, labels in models.items()},
        answering={stage: labels.get("finish", NOTHING)[1] for stage, labels in models.items()},
    )


def lengths_of(journal: Iterable[Record]) -> tuple[tuple[int, ...], ...]:
    # Whole groups only.
    group_of: dict[object, object] = {}
    finished: dict[object, list[int]] = {}
    for each in journal:
        if each.get("event") == "admitted":
            group_of[each["rollout"]] = each["group"]
        elif each.get("event") == "finished":
            group = group_of.get(each["rollout"], each["rollout"])
            finished.setdefault(group, []).append(max(1, cast("int", each["tokens"])))
    size = max(map(len, finished.values()), default=0)
    return tuple(tuple(group) for group in finished.values() if len(group) == size)
