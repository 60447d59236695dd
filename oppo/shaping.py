"""Score shaping, from a reward model's scores to rewards: pure values, so the state of a run can be read and kept.

In this order: running normalisation, clip, scale, and penalties for responses that did not end by themselves, and for
long ones. The penalties come last, so they are in the unit of the reward, not of the scores.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from oppo.declared import Count, Limit, NonNegative, Positive, require_declared
from oppo.events import BoolArray, FloatArray

_LEAST_DEVIATION: Final = float(np.finfo(np.float32).tiny)
"""What divides scores must not make infinities of them in float32."""


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Running moments of all scores so far (Chan, Golub, LeVeque 1979, equation 2.1).

    Attributes:
        count: number of scores.
        mean: of the scores.
        squares: the sum of their squared deviations from the mean.

    Example:
        >>> RunningMoments().after(np.array([1, 3], np.float32)).after(np.array([5], np.float32))
        RunningMoments(count=3, mean=3.0, squares=8.0)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 1 if there are fewer than two scores, or all are equal in float32."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return deviation if deviation >= _LEAST_DEVIATION else 1.0

    def after(self, scores: FloatArray) -> RunningMoments:
        """Return the moments with a batch of scores, float32 [n], included."""
        if not len(scores):
            return self
        batch = scores.astype(np.float64)
        mean, count = float(batch.mean()), self.count + len(batch)
        shift = mean - self.mean
        squares = float(np.square(batch - mean).sum()) + shift * shift * self.count * len(batch) / count
        return RunningMoments(count, self.mean + shift * len(batch) / count, self.squares + squares)


@dataclass(frozen=True, slots=True)
class ScoreShaping:
    """The map from a score to the reward of a response; the defaults are the identity.

    Attributes:
        norm: subtract the running mean of all scores, this batch's included, and divide by their standard deviation.
        clip: bound the (normalised) score to ``-clip .. clip``; ``inf`` does not.
        scale: multiplies the result.
        missing_eos_penalty: subtracted for responses that ended at the length cap, not by a stop, as in TRL.
        long_from, long_to: lengths in sampled tokens between which a penalty grows from 0 to ``long_penalty``, as in
            DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13); equal ones: no penalty.
        long_penalty: subtracted from the reward of a response of ``long_to`` tokens.
        moments: of all scores so far; only kept with ``norm``.

    Raises:
        ValueError: a value is out of range.
    """

    norm: bool = False
    clip: Limit = math.inf
    scale: Positive = 1.0
    missing_eos_penalty: NonNegative = 0.0
    long_from: Count = 0
    long_to: Count = 0
    long_penalty: NonNegative = 1.0
    moments: RunningMoments = field(default_factory=RunningMoments)

    def __post_init__(self) -> None:
        require_declared(self)
        if self.long_from > self.long_to:
            raise ValueError(
                f"the penalty on long responses grows between two lengths, long_from = {self.long_from} and long_to = "
                f"{self.long_to}: expected 0 <= long_from <= long_to"
            )

    def after(self, scores: FloatArray) -> ScoreShaping:
        """Return this shaping with a batch's scores, float32 [n], in its moments."""
        return replace(self, moments=self.moments.after(scores)) if self.norm else self

    @property
    def slope(self) -> float:
        """By how much the reward of a response grows with its score where nothing is clipped.

        It multiplies rewards at single tokens (:class:`~oppo.token_rewards.TokenRewards`). Centring, clipping and
        penalties act on the whole response; the last token has what they change.
        """
        return self.scale / self.moments.std if self.norm else self.scale

    def shaped(self, scores: FloatArray, stopped: BoolArray, lengths: NDArray[np.int64]) -> FloatArray:
        """Return the rewards of whole responses: float32 [n].

        Args:
            scores: float32 [n].
            stopped: bool [n], whether the response ended by a stop token or text.
            lengths: int64 [n], sampled tokens of the response: a tool's answer is not the policy's to shorten.
        """
        rewards: NDArray[np.float64] = scores.astype(np.float64)
        if self.norm:
            rewards = (rewards - self.moments.mean) / self.moments.std
        rewards = rewards.clip(-self.clip, self.clip) * self.scale
        rewards = np.where(stopped, rewards, rewards - self.missing_eos_penalty)
        if self.long_to > self.long_from:
            beyond = (lengths - self.long_from) / (self.long_to - self.long_from)
            rewards = rewards - self.long_penalty * beyond.clip(0, 1)
        return rewards.astype(np.float32)
