"""What a step showed: what its stages record of it, and the one observation that this comes to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Protocol

from oppo.admission import Observation, Scoring
from oppo.events import FinishReason, Prompt, StepReport
from oppo.graph import Step


class Growing(Protocol):
    """A rollout in flight, as far as it is measured."""

    @property
    def prompt(self) -> Prompt:
        """Says which unit it belongs to."""

    @property
    def length(self) -> int:
        """Tokens so far."""

    @property
    def reason(self) -> FinishReason | None:
        """Why it ended, if it has."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What was decoded in a step; the fields are those of :class:`oppo.Observation`."""

    decode_steps: int = 0
    tokens: int = 0
    rows: int = 0
    finished: tuple[int, ...] = ()
    capped: int = 0
    parked: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DecodePhase:
    """When a step's rollouts were decoded, and what came of them; recorded once, by the stage that decodes.

    Attributes:
        start, end: loop time, in seconds.
    """

    start: float
    end: float
    progress: Progress


@dataclass(frozen=True, slots=True)
class ScorerCall:
    """When a scorer was at work; recorded by the stage that called it, for each call.

    Attributes:
        start, end: loop time, in seconds.
        answered: whether values were known at the end.
    """

    start: float
    end: float
    answered: bool


@dataclass(frozen=True, slots=True)
class StepMetrics:
    """Numbers that belong among the metrics of a step, by their names there; recorded by any stage."""

    values: Mapping[str, float]


class Decoding:
    """Measures a step's decoding: made when it begins, asked when it has ended.

    Args:
        flights: every rollout in flight, units together; rollouts that are complete only count as part of their unit.
    """

    def __init__(self, flights: Iterable[Growing]) -> None:
        ordered = sorted(flights, key=lambda flight: flight.prompt.rollout)
        units = [list(unit) for _, unit in groupby(ordered, key=lambda flight: flight.prompt.admission)]
        self._units: list[list[Growing]] = [unit for unit in units if any(flight.reason is None for flight in unit)]
        self._rows = sum(flight.reason is None for unit in self._units for flight in unit)
        self._before = {flight.prompt.rollout: flight.length for unit in self._units for flight in unit}

    def progress(self) -> Progress:
        """Return what has come of the rollouts since."""
        gains = [flight.length - self._before[flight.prompt.rollout] for unit in self._units for flight in unit]
        longest = [max(unit, key=lambda flight: flight.length) for unit in self._units]
        done = [all(flight.reason is not None for flight in unit) for unit in self._units]
        ended = [flight for flight, complete in zip(longest, done, strict=True) if complete]
        return Progress(
            decode_steps=max(gains, default=0),
            tokens=sum(gains),
            rows=self._rows,
            finished=tuple(flight.length for flight in ended),
            capped=sum(flight.reason == "length" for flight in ended),
            parked=tuple(flight.length for flight, complete in zip(longest, done, strict=True) if not complete),
        )


def observation(report: StepReport, step: Step) -> Observation:
    """Return what a step that is over showed.

    Args:
        report: of the step.
        step: has the records of the stages that decoded and scored. A scorer's calls after its last
            answer do not count, since the step does not wait for them.
    """
    decoding = next((phase for _, phase in step.recorded(DecodePhase)), None)
    progress = decoding.progress if decoding else Progress()
    scored = step.recorded(ScorerCall)
    ends = {stage: call.end for stage, call in scored if call.answered}
    begin = decoding.start if decoding else min((call.start for _, call in scored), default=0.0)
    cut = decoding.end if decoding else begin
    ready = max([cut, *ends.values()])
    return Observation(
        step=report.index,
        seconds=report.seconds,
        decode_seconds=cut - begin,
        decode_steps=progress.decode_steps,
        tokens=progress.tokens,
        rows=progress.rows,
        finished=progress.finished,
        capped=progress.capped,
        parked=progress.parked,
        scoring=tuple(
            _scoring(stage, [call for name, call in scored if name == stage and call.end <= end], cut)
            for stage, end in sorted(ends.items())
        ),
        rest_seconds=max(0.0, report.seconds - (ready - begin)),
        score=report.score,
        mismatch_kl=_measured(report, "mismatch/kl"),
        effective_samples=_measured(report, "mismatch/ess"),
    )


def _measured(report: StepReport, name: str) -> float | None:
    """Return a metric; ``None`` too where it is no finite number, from which nothing can be learned."""
    value = report.metrics.get(name)
    return value if value is not None and math.isfinite(value) else None


def _scoring(stage: str, calls: Sequence[ScorerCall], cut: float) -> Scoring:
    return Scoring(
        stage,
        before=sum(max(0.0, min(call.end, cut) - call.start) for call in calls),
        after=sum(max(0.0, call.end - max(call.start, cut)) for call in calls),
    )
