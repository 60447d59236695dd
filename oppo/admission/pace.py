"""What a step's time consists of, learned from a few steps: decoding, scoring, the rest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from oppo.admission.observation import Observation
from oppo.admission.survival import FloatVector

PER_STEP = 0.8
"""Prior: the part of decoding that is paid for each decode step; the other part is paid for each token."""

SPREAD = 0.3
"""Standard deviation of the prior of each part."""

LEAST_NOISE = 0.02
"""How well the seconds of decoding are known at best, in parts: what few points that lie on a line cannot tell."""


@dataclass(frozen=True, slots=True)
class ScorerPace:
    """What one scorer needs for a step's batch, in seconds.

    Attributes:
        busy: all its work; a step is no shorter, however short its decoding is.
        tail: what is left to do when decoding ends, however long it was.
    """

    busy: float
    tail: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Predicts the seconds of a step: ``max(decode + tail, busy) + rest`` with the slowest scorer's tail and busy.

    Attributes:
        step: seconds for each decode step.
        token: seconds for each token of a unit, with a whole batch of them.
        scorers: of each scorer.
        rest: seconds of everything else: advantages, update, publishing.
    """

    step: float
    token: float
    scorers: tuple[ScorerPace, ...]
    rest: float

    def seconds(self, decode_steps: FloatVector, mean_length: float) -> FloatVector:
        """Return the predicted seconds of steps of so many decode steps each, in their shape."""
        decode = self.step * decode_steps + self.token * mean_length
        ready = decode
        for scorer in self.scorers:
            ready = np.maximum(ready, np.maximum(decode + scorer.tail, scorer.busy))
        return ready + self.rest


def pace(window: Sequence[Observation], batch: int) -> Pace:
    """Return what the steps in the window say; they have all decoded something, and that took time.

    Args:
        window: observations, in any order.
        batch: units in a full batch.
    """
    step, token = decode_costs(window, batch)
    return Pace(step, token, scorer_paces(window), float(np.mean([seen.rest_seconds for seen in window])))


def decode_costs(window: Sequence[Observation], batch: int) -> tuple[float, float]:
    """Return the seconds for each decode step, and for each token of a unit; neither is negative.

    A Bayesian regression: with everything in units of its mean, ``seconds = p * steps + q * tokens + noise``, where
    p ~ N(0.8, 0.3) and q ~ N(0.2, 0.3) before anything is known. The noise is what the points themselves show of it,
    so that the prior counts for as much as they leave open: for all where each step is like the others.
    """
    observed = np.array([(seen.decode_steps, seen.tokens / batch, seen.decode_seconds) for seen in window], np.float64)
    means = observed.mean(0)
    inputs, seconds = (observed / means)[:, :2], (observed / means)[:, 2]
    spare = max(1, len(window) - 2)
    noise = float(np.linalg.norm(seconds - inputs @ _parts(inputs, seconds, LEAST_NOISE))) / spare**0.5
    of_steps, of_tokens = np.maximum(0.0, _parts(inputs, seconds, max(noise, LEAST_NOISE)))
    if of_tokens == 0 or of_steps == 0:
        of_steps, of_tokens = float(of_steps > 0), float(of_tokens > 0)
    return float(of_steps * means[2] / means[0]), float(of_tokens * means[2] / means[1])


def _parts(inputs: FloatVector, seconds: FloatVector, noise: float) -> FloatVector:
    """Return the most likely part of steps and of tokens, float64 [2], at that standard deviation of the noise."""
    prior = np.array([PER_STEP, 1 - PER_STEP])
    precision = inputs.T @ inputs + (noise / SPREAD) ** 2 * np.eye(2)
    parts: FloatVector = prior + np.linalg.solve(precision, inputs.T @ (seconds - inputs @ prior))
    return parts


def scorer_paces(window: Sequence[Observation]) -> tuple[ScorerPace, ...]:
    """Return what each scorer needs, in the mean.

    Work after the end of decoding has one of two causes. The scorer had more to do than decoding lasted, and was busy
    all along: a longer step would have hidden that. Or it was not yet possible, although the scorer was idle before:
    that will be the same at any length of a step. So the tail is what was done afterwards, times the part of the
    decoding time in which the scorer was idle.
    """
    busy: dict[str, list[float]] = {}
    tail: dict[str, list[float]] = {}
    for seen in window:
        for scoring in seen.scoring:
            idle = max(0.0, 1 - scoring.before / seen.decode_seconds) if seen.decode_seconds > 0 else 1.0
            busy.setdefault(scoring.stage, []).append(scoring.busy)
            tail.setdefault(scoring.stage, []).append(scoring.after * idle)
    return tuple(ScorerPace(float(np.mean(busy[stage])), float(np.mean(tail[stage]))) for stage in busy)
