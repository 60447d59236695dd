"""The records of a step's stages, and the observation made of them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from oppo.admission import Observation, Scoring
from oppo.errors import ProtocolError
from oppo.events import StepReport
from oppo.graph import Step
from oppo.numeric import require_metrics
from oppo.observe import Span
from oppo.stages.in_flight import InFlightRollout
from oppo.stages.stretches import Grown, stretches

ACCUMULATE: Final = "accumulate"
"""The label of work on a part of a batch, before the update."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Tokens that a step's rollouts gained; recorded by the stage that decodes, once for each round of the step.

    Attributes:
        decode_steps, tokens, rows, finished, capped, parked, chunk: as of :class:`oppo.Observation`.
        grown: what was decoded of each rollout; of those that had not ended before.
    """

    decode_steps: int = 0
    tokens: int = 0
    rows: int = 0
    finished: tuple[int, ...] = ()
    capped: int = 0
    parked: tuple[int, ...] = ()
    chunk: int = 0
    grown: tuple[Grown, ...] = ()


@dataclass(frozen=True, slots=True)
class ScorerReading:
    """A scorer's call that read; recorded by the stage that made it.

    Attributes:
        tokens: that it read.
    """

    tokens: int


@dataclass(frozen=True, slots=True)
class ScorerAnswer:
    """A scorer's call that returned values; recorded by the stage that made it.

    Attributes:
        start, at: loop time at its beginning and at its end, in seconds.
        rollouts: for which it did.
    """

    start: float
    at: float
    rollouts: int


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Metrics of a step by name; recorded by any stage."""

    values: Mapping[str, float]

    def __post_init__(self) -> None:
        require_metrics("the metrics of a step", self.values, error=ProtocolError)


@dataclass(frozen=True, slots=True)
class Averaged:
    """Measurements by metric, which is their mean over the step; recorded by any stage."""

    values: Mapping[str, Sequence[float]]


def step_metrics(step: Step) -> dict[str, float]:
    """Return the metrics that the stages of a step recorded."""
    metrics = {name: value for _, each in step.recorded(StepMetrics) for name, value in each.values.items()}
    averaged: dict[str, list[float]] = {}
    for _, each in step.recorded(Averaged):
        for name, values in each.values.items():
            averaged.setdefault(name, []).extend(values)
    return metrics | {name: math.fsum(values) / len(values) for name, values in averaged.items() if values}


class DecodeMeter:
    """Measures what rollouts gain by decoding, from its start.

    Args:
        rollouts: every rollout in flight; complete ones count only as part of an incomplete unit.
        chunk: tokens in a chunk; 0: unknown.
    """

    def __init__(self, rollouts: Iterable[InFlightRollout], chunk: int = 0) -> None:
        self._chunk = chunk
        self._units: list[list[InFlightRollout]] = []
        self._lengths: dict[int, int] = {}
        self._joined: dict[int, int] = {}
        self._unended: list[InFlightRollout] = []
        self._made = 0
        self.add(rollouts)
        self._rows = sum(each.reason is None for unit in self._units for each in unit)

    def add(self, rollouts: Iterable[InFlightRollout]) -> None:
        """Measure these too: they have joined after as many decode steps as are noted by now."""
        ordered = sorted(rollouts, key=lambda each: each.prompt.rollout)
        units = [list(unit) for _, unit in groupby(ordered, key=lambda each: each.prompt.admission)]
        units = [unit for unit in units if any(each.reason is None for each in unit)]
        self._units += units
        self._lengths |= {each.prompt.rollout: each.length for unit in units for each in unit}
        self._joined |= {each.prompt.rollout: self._made for unit in units for each in unit}
        self._unended += [each for unit in units for each in unit if each.reason is None]

    def note_end(self, rollout: InFlightRollout) -> None:
        """Note the decode steps that were made by the end of a rollout, or by the cut."""
        self._made = max(self._made, self._joined[rollout.prompt.rollout] + self._gain(rollout))

    def _gain(self, each: InFlightRollout) -> int:
        return each.length - self._lengths[each.prompt.rollout]

    def decoded(self) -> Decoded:
        """Return what they have gained so far."""
        for unit in self._units:
            for each in unit:
                self.note_end(each)
        longest = [
            (max(unit, key=lambda each: each.length), all(each.reason is not None for each in unit))
            for unit in self._units
        ]
        return Decoded(
            decode_steps=self._made,
            tokens=sum(self._gain(each) for unit in self._units for each in unit),
            rows=self._rows,
            finished=tuple(rollout.length for rollout, complete in longest if complete),
            capped=sum(rollout.reason == "length" for rollout, complete in longest if complete),
            parked=tuple(rollout.length for rollout, complete in longest if not complete),
            chunk=self._chunk,
            grown=tuple(map(self._grown, self._unended)),
        )

    def _grown(self, each: InFlightRollout) -> Grown:
        number = each.prompt.rollout
        return Grown(len(each.prompt.tokens), self._lengths[number], each.length, each.ended, self._joined[number])


def observation(report: StepReport, step: Step) -> Observation:
    """Return the observation of a finished step.

    Args:
        report: of the step.
        step: with the work and the records of the stages that decoded and scored. A scorer's calls after its last
            answer do not count, since the step does not wait for them.
    """
    work = [span for _, span in step.recorded(Span)]
    decoding = [span for span in work if span.role == "decode"]
    calls = [span for span in work if span.role == "score"]
    rounds = [each for _, each in step.recorded(Decoded)] or [Decoded()]
    answered = {stage: answer.at for stage, answer in step.recorded(ScorerAnswer)}
    begin = min((span.start for span in decoding or calls), default=0.0)
    cut = max((span.end for span in decoding), default=begin)
    waited = max([cut, *answered.values()])
    rest = max(0.0, report.seconds - (waited - begin))
    if step.lookahead:
        rest = math.fsum(span.end - span.start for span in work if span.role == "update")
    ending = math.inf if step.lookahead else waited  # what is accumulated later is part of the rest
    accumulated = [min(span.end, ending) - span.start for span in work if span.label == ACCUMULATE]
    return Observation(
        step=report.index,
        seconds=report.seconds,
        decode_seconds=math.fsum(span.end - span.start for span in decoding),
        decode_steps=sum(each.decode_steps for each in rounds),
        tokens=sum(each.tokens for each in rounds),
        rows=rounds[0].rows,
        finished=tuple(length for each in rounds for length in each.finished),
        capped=sum(each.capped for each in rounds),
        parked=rounds[-1].parked,
        stretches=tuple(
            found
            for each, span in zip(rounds, decoding, strict=False)  # a step whose rollouts were complete decodes nothing
            for found in stretches(each.grown, span.start, span.end)
        ),
        scoring=tuple(_scoring(stage, step, cut, last) for stage, last in sorted(answered.items())),
        rest_seconds=rest,
        accumulate_seconds=math.fsum(max(0.0, seconds) for seconds in accumulated),
        score=report.score,
        mismatch_kl=_finite(report, "mismatch/kl"),
        effective_samples=_finite(report, "mismatch/ess"),
        lookahead=step.lookahead,
        chunk=rounds[0].chunk,
    )


def _finite(report: StepReport, name: str) -> float | None:
    """Return a metric; ``None`` if it is absent or not finite."""
    value = report.metrics.get(name)
    return value if value is not None and math.isfinite(value) else None


def _scoring(stage: str, step: Step, cut: float, last: float) -> Scoring:
    """Return the work of a scorer whose last value came at ``last``."""
    calls = [span for _, span in step.recorded(Span) if span.track == stage and span.role == "score"]
    waited = [call for call in calls if call.end <= last]
    readings = [reading for name, reading in step.recorded(ScorerReading) if name == stage]
    answers = [answer for name, answer in step.recorded(ScorerAnswer) if name == stage]
    return Scoring(
        stage,
        before=sum(max(0.0, min(call.end, cut) - call.start) for call in waited),
        after=sum(max(0.0, call.end - max(call.start, cut)) for call in waited),
        spare=sum(call.end - call.start for call in calls if call.end > last),
        calls=len(readings),
        tokens=sum(reading.tokens for reading in readings),
        answered=sum(answer.rollouts for answer in answers),
        answering=sum(answer.at - answer.start for answer in answers),
    )
