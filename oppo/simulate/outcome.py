"""Statistics of a simulated run, without its first and last steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oppo.events import Batch, StepReport

LAST = 3
"""The last steps do not count: they admit only what can still be trained, so they are shorter."""


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """Lengths and lags of a batch.

    Attributes:
        lengths: of its responses, in tokens.
        lags: versions between the first token of each and the weights that it trains.
        token_lag: the same of a token, mean over those that were sampled.
    """

    lengths: NDArray[np.int64]
    lags: NDArray[np.int64]
    token_lag: float

    @classmethod
    def of(cls, batch: Batch, version: int) -> BatchFacts:
        """Return the facts of a batch that trains weights of this version."""
        first = np.array([int(response.versions[0]) for response in batch.responses], np.int64)
        lag = float(np.mean(version - batch.versions[batch.sampled])) if batch.sampled.any() else 0.0
        return cls(np.diff(batch.offsets), version - first, lag)


@dataclass(frozen=True, slots=True)
class Restarts:
    """The cost of restarted rollouts.

    Attributes:
        waste: discarded tokens for each trained token.
        swing: standard deviation of the batches' mean lengths, over their mean.
    """

    waste: float
    swing: float


@dataclass(frozen=True, slots=True)
class ScheduleOutcome:
    """Statistics of a run without its first and last steps.

    Attributes:
        seconds: mean of a step, until the next could begin.
        tokens: trained in a step, mean.
        lag: mean versions between a rollout's first token and its update.
        longest_lag: the largest.
        token_lag: the same of a token, mean.
        extra: mean of the controller's choices.
        predicted: mean predicted seconds of a step over the mean measured ones; NaN without predictions.
        spread: root mean square of the predictions' relative errors.
        extras: the choices, step by step.
        idle: share of the time in which a replica of the actor decodes nothing, mean over replicas.
        peak_tokens: most tokens of rollouts that were decoded at once, prompts included.
        restarts: of a controller that restarts rollouts; ``None`` for the others.
    """

    seconds: float
    tokens: float
    lag: float
    longest_lag: int
    token_lag: float
    extra: float
    predicted: float
    spread: float
    extras: tuple[int, ...]
    idle: float
    peak_tokens: float
    restarts: Restarts | None = None

    @property
    def per_token(self) -> float:
        """Seconds for each trained token."""
        return self.seconds / self.tokens

    @classmethod
    def of(
        cls,
        reports: Sequence[StepReport],
        ends: Sequence[float],
        batches: Sequence[BatchFacts],
        *,
        counted: slice,
        grain: int = 1,
        idle: float = 0.0,
        peak_tokens: float = 0.0,
        restarts: bool = False,
    ) -> ScheduleOutcome:
        """Return the statistics of a run.

        Args:
            reports: of all steps.
            ends: loop time at the end of each.
            batches: of each.
            counted: the steps that count, from the second one at the earliest.
            grain: tokens for each token of a batch.
            idle, peak_tokens: as of the attributes.
            restarts: whether rollouts may restart.
        """
        steps, trained = reports[counted], batches[counted]
        seconds = np.diff(ends)[counted.start - 1 : counted.stop - 1]
        lags = np.concatenate([each.lags for each in trained])
        lengths = [each.lengths for each in trained]
        predicted = np.array([report.metrics.get("deferral/predicted_seconds", math.nan) for report in steps])
        extras = tuple(int(report.metrics.get("deferral/extra", 0)) for report in reports)
        cost = None
        if restarts:
            discarded = sum(report.metrics.get("deferral/discarded_tokens", 0.0) for report in steps)
            means = np.array([each.mean() for each in lengths])
            waste = float(discarded / sum(each.sum() for each in lengths))
            cost = Restarts(waste, float(means.std() / means.mean()))
        return cls(
            seconds=float(seconds.mean()),
            tokens=grain * float(np.mean([each.sum() for each in lengths])),
            lag=float(lags.mean()),
            longest_lag=int(lags.max()),
            token_lag=float(np.mean([each.token_lag for each in trained])),
            extra=float(np.mean(extras[counted])),
            predicted=float(predicted.mean() / seconds.mean()),
            spread=float(np.sqrt(np.mean((predicted / seconds - 1) ** 2))),
            extras=extras,
            idle=idle,
            peak_tokens=peak_tokens,
            restarts=cost,
        )
