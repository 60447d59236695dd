"""The records of a step's stages, and the observation made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from oppo.admission import Observation, Scoring, Stretch
from oppo.events import StepReport
from oppo.graph import Step
from oppo.stages.in_flight import InFlightRollout
from oppo.stages.stretches import Decoded, stretches


@dataclass(frozen=True, slots=True)
class DecodePhase:
    """The decoding of a step's rollouts; recorded by the stage that decodes, once for each round of the step.

    Attributes:
        start, end: loop time, in seconds.
        decode_steps, tokens, rows, finished, capped, parked, chunk, stretches: as of :class:`oppo.Observation`.
    """

    start: float
    end: float
    decode_steps: int = 0
    tokens: int = 0
    rows: int = 0
    finished: tuple[int, ...] = ()
    capped: int = 0
    parked: tuple[int, ...] = ()
    chunk: int = 0
    stretches: tuple[Stretch, ...] = ()


@dataclass(frozen=True, slots=True)
class ScorerCall:
    """One call of a scorer; recorded by the stage that made it.

    Attributes:
        start, end: loop time, in seconds.
        answered: for how many rollouts it returned values; 0: it only read.
        tokens: that it read.
    """

    start: float
    end: float
    answered: int
    tokens: int = 0


@dataclass(frozen=True, slots=True)
class TrainingPhase:
    """The update of a step's batch; recorded by the stage that trains.

    Attributes:
        seconds: of the update and the publishing, without the wait for other steps between them.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of a step by name; recorded by any stage."""

    values: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Samples:
    """Measurements by metric, which is their mean over the step; recorded by any stage."""

    values: Mapping[str, Sequence[float]]


def step_metrics(step: Step) -> dict[str, float]:
    """Return the metrics that the stages of a step recorded."""
    metrics = {name: value for _, each in step.recorded(StepMetrics) for name, value in each.values.items()}
    samples: dict[str, list[float]] = {}
    for _, each in step.recorded(Samples):
        for name, values in each.values.items():
            samples.setdefault(name, []).extend(values)
    return metrics | {name: math.fsum(values) / len(values) for name, values in samples.items() if values}


class DecodeMeter:
    """Measures a decode phase from its start.

    Args:
        rollouts: every rollout in flight; complete ones count only as part of an incomplete unit.
        start: loop time, in seconds.
        chunk: tokens in a chunk; 0: unknown.
    """

    def __init__(self, rollouts: Iterable[InFlightRollout], start: float, chunk: int = 0) -> None:
        ordered = sorted(rollouts, key=lambda each: each.prompt.rollout)
        units = [list(unit) for _, unit in groupby(ordered, key=lambda each: each.prompt.admission)]
        self._start, self._chunk = start, chunk
        self._units = [unit for unit in units if any(each.reason is None for each in unit)]
        self._rows = sum(each.reason is None for unit in self._units for each in unit)
        self._lengths = {each.prompt.rollout: each.length for unit in self._units for each in unit}
        self._unended = {each.prompt.rollout for unit in self._units for each in unit if each.reason is None}

    def phase(self, end: float) -> DecodePhase:
        """Return the phase that ends at ``end``, loop time in seconds."""
        gains = [each.length - self._lengths[each.prompt.rollout] for unit in self._units for each in unit]
        longest = [
            (max(unit, key=lambda each: each.length), all(each.reason is not None for each in unit))
            for unit in self._units
        ]
        return DecodePhase(
            self._start,
            end,
            decode_steps=max(gains, default=0),
            tokens=sum(gains),
            rows=self._rows,
            finished=tuple(rollout.length for rollout, complete in longest if complete),
            capped=sum(rollout.reason == "length" for rollout, complete in longest if complete),
            parked=tuple(rollout.length for rollout, complete in longest if not complete),
            chunk=self._chunk,
            stretches=stretches(self._decoded(), end - self._start),
        )

    def _decoded(self) -> list[Decoded]:
        """Return what was decoded of each rollout."""
        return [
            Decoded(
                len(each.prompt.tokens),
                self._lengths[each.prompt.rollout],
                each.length,
                each.ended - self._start,
            )
            for unit in self._units
            for each in unit
            if each.prompt.rollout in self._unended
        ]


def observation(report: StepReport, step: Step) -> Observation:
    """Return the observation of a finished step.

    Args:
        report: of the step.
        step: with the records of the stages that decoded and scored. A scorer's calls after its last answer do not
            count, since the step does not wait for them.
    """
    calls = step.recorded(ScorerCall)
    first = min((call.start for _, call in calls), default=0.0)
    phases = [phase for _, phase in step.recorded(DecodePhase)] or [DecodePhase(first, first)]
    begin, end = phases[0].start, phases[-1].end
    ends = {stage: call.end for stage, call in calls if call.answered}
    ready = max([end, *ends.values()])
    rest = max(0.0, report.seconds - (ready - begin))
    if step.lookahead:
        rest = sum(training.seconds for _, training in step.recorded(TrainingPhase))
    return Observation(
        step=report.index,
        seconds=report.seconds,
        decode_seconds=sum(phase.end - phase.start for phase in phases),
        decode_steps=sum(phase.decode_steps for phase in phases),
        tokens=sum(phase.tokens for phase in phases),
        rows=phases[0].rows,
        finished=tuple(length for phase in phases for length in phase.finished),
        capped=sum(phase.capped for phase in phases),
        parked=phases[-1].parked,
        stretches=tuple(stretch for phase in phases for stretch in phase.stretches),
        scoring=tuple(
            _scoring(stage, [call for name, call in calls if name == stage], end, last)
            for stage, last in sorted(ends.items())
        ),
        rest_seconds=rest,
        score=report.score,
        mismatch_kl=_finite(report, "mismatch/kl"),
        effective_samples=_finite(report, "mismatch/ess"),
        lookahead=step.lookahead,
        chunk=phases[0].chunk,
    )


def _finite(report: StepReport, name: str) -> float | None:
    """Return a metric; ``None`` if it is absent or not finite."""
    value = report.metrics.get(name)
    return value if value is not None and math.isfinite(value) else None


def _scoring(stage: str, calls: Sequence[ScorerCall], cut: float, last: float) -> Scoring:
    """Return the work of a scorer whose last value came at ``last``."""
    waited = [call for call in calls if call.end <= last]
    reading = [call for call in calls if not call.answered]
    return Scoring(
        stage,
        before=sum(max(0.0, min(call.end, cut) - call.start) for call in waited),
        after=sum(max(0.0, call.end - max(call.start, cut)) for call in waited),
        spare=sum(call.end - call.start for call in calls if call.end > last),
        calls=len(reading),
        tokens=sum(call.tokens for call in reading),
        answered=sum(call.answered for call in calls),
        answering=sum(call.end - call.start for call in calls if call.answered),
    )
