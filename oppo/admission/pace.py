"""A model of a step's time, fitted to a few steps: decoding, scoring, the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oppo.admission.observation import Observation
from oppo.admission.survival import FloatVector

PER_STEP = 0.8
"""Prior mean of the share of decode time that is paid per decode step; the other share is paid per token."""

SPREAD = 0.3
"""Standard deviation of the prior of each share."""

LEAST_NOISE = 0.02
"""Lower bound of the relative noise of decode seconds, which a few collinear points would underestimate."""


@dataclass(frozen=True, slots=True)
class ScorerPace:
    """The seconds of one scorer for a step's batch.

    Attributes:
        busy: of all its work; a lower bound of the step.
        tail: of the work left when decoding ends, whatever its length.
    """

    busy: float
    tail: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Predicts the seconds of a step from those of its phases.

    Without lookahead they are ``max(decode + tail, busy) + rest``, with the slowest scorer's tail and busy. With a
    lookahead of n, n + 1 steps are alive and each phase has one of them at a time, so a step takes::

        max(decode, busy, rest, (decode + tail + rest) / (n + 1))

    Deferral shortens decoding alone, so it gains nothing below the other two.

    Attributes:
        step: seconds per decode step.
        token: seconds per token of a unit, for a whole batch.
        scorers: of each scorer.
        rest: seconds of everything else: advantages, update, publishing.
        lookahead: number of steps that begin before the current one has ended.
    """

    step: float
    token: float
    scorers: tuple[ScorerPace, ...]
    rest: float
    lookahead: int = 0

    def seconds(self, decode_steps: FloatVector, mean_length: float) -> FloatVector:
        """Return the predicted seconds for each number of decode steps, in their shape."""
        decode = self.step * decode_steps + self.token * mean_length
        busy = max((scorer.busy for scorer in self.scorers), default=0.0)
        tail = max((scorer.tail for scorer in self.scorers), default=0.0)
        if not self.lookahead:
            return np.maximum(decode + tail, busy) + self.rest
        chain = (decode + tail + self.rest) / (self.lookahead + 1)
        return np.maximum(np.maximum(decode, chain), max(busy, self.rest))


def pace(window: Sequence[Observation], batch: int) -> Pace:
    """Return the pace fitted to a window of steps.

    Args:
        window: observations with decoding, in any order.
        batch: units in a full batch.
    """
    step, token = decode_costs(window, batch)
    rest = float(np.mean([seen.rest_seconds for seen in window]))
    return Pace(step, token, scorer_paces(window), rest, max((seen.lookahead for seen in window), default=0))


def decode_costs(window: Sequence[Observation], batch: int) -> tuple[float, float]:
    """Return the seconds per decode step, and per token of a unit; neither is negative.

    A Bayesian regression: with everything in units of its mean, ``seconds = p * steps + q * tokens + noise``, with the
    priors p ~ N(0.8, 0.3) and q ~ N(0.2, 0.3). The noise is estimated from the residuals, so the prior decides what the
    points leave open: everything if all steps are alike.
    """
    observed = np.array([(seen.decode_steps, seen.tokens / batch, seen.decode_seconds) for seen in window], np.float64)
    means = observed.mean(0)
    inputs, seconds = (observed / means)[:, :2], (observed / means)[:, 2]
    spare = max(1, len(window) - 2)
    noise = float(np.linalg.norm(seconds - inputs @ _shares(inputs, seconds, LEAST_NOISE))) / spare**0.5
    of_steps, of_tokens = np.maximum(0.0, _shares(inputs, seconds, max(noise, LEAST_NOISE)))
    if of_tokens == 0 or of_steps == 0:
        of_steps, of_tokens = float(of_steps > 0), float(of_tokens > 0)
    return float(of_steps * means[2] / means[0]), float(of_tokens * means[2] / means[1])


def _shares(inputs: FloatVector, seconds: FloatVector, noise: float) -> FloatVector:
    """Return the most likely shares of steps and of tokens, float64 [2], at that standard deviation of the noise."""
    prior = np.array([PER_STEP, 1 - PER_STEP])
    precision = inputs.T @ inputs + (noise / SPREAD) ** 2 * np.eye(2)
    shares: FloatVector = prior + np.linalg.solve(precision, inputs.T @ (seconds - inputs @ prior))
    return shares


def scorer_paces(window: Sequence[Observation]) -> tuple[ScorerPace, ...]:
    """Return the mean pace of each scorer.

    Work after decoding has one of two causes. Either the scorer was busy all along with more work than decoding lasted:
    a longer step would hide it. Or the work was not yet possible although the scorer was idle: a step of any length has
    it. So the tail is the work after decoding, times the share of decoding in which the scorer was idle.
    """
    busy: dict[str, list[float]] = {}
    tail: dict[str, list[float]] = {}
    for seen in window:
        for scoring in seen.scoring:
            idle = max(0.0, 1 - scoring.before / seen.decode_seconds) if seen.decode_seconds > 0 else 1.0
            busy.setdefault(scoring.stage, []).append(scoring.busy)
            tail.setdefault(scoring.stage, []).append(scoring.after * idle)
    return tuple(ScorerPace(float(np.mean(busy[stage])), float(np.mean(tail[stage]))) for stage in busy)
