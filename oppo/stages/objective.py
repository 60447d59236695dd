"""What a batch is worth before anything is estimated: the shaped score of each response, less its KL to the reference.

An estimator of advantages keeps two things between two steps, what shapes its scores and what sets the coefficient of
its KL penalty. Both are values here, so it says itself when they move on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, SupportsFloat, TypeAlias, get_args

import numpy as np

from oppo.errors import ConfigError
from oppo.estimators import AdaptiveKL, FixedKL, KLEstimator, kl_estimate, shaped_rewards
from oppo.events import Batch, FloatArray
from oppo.shaping import RunningMoments, ScoreShaping
from oppo.stages.rows import flat

KLControl: TypeAlias = FixedKL | AdaptiveKL

OF_THE_REFERENCE = frozenset({"objective/kl", "objective/kl_coef", "objective/non_score_reward"})
"""The metrics that say nothing where there is no reference."""


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """What the N rollouts of a batch, of T tokens, are worth.

    Attributes:
        shaped: float32 [N], the scores as rewards.
        kl: float32 [T], an estimate of each token's KL to the reference, in nats: that of the proximal policy where its
            log-probs are known; 0 where a token was not sampled, and without a reference.
        coefficient: of the KL penalty.
    """

    shaped: FloatArray
    kl: FloatArray
    coefficient: float

    @classmethod
    def of(cls, batch: Batch, shaping: ScoreShaping, control: KLControl, estimator: KLEstimator) -> Objective:
        """Return what a batch is worth.

        Args:
            batch: of which nothing is estimated yet.
            shaping: what is made of the scores; it has seen those of this batch.
            control: of the coefficient; it has not seen this batch.
            estimator: of a token's KL.
        """
        kl = np.zeros(len(batch.tokens), np.float32)
        if batch.reference is not None:
            current = batch.logprobs if batch.proximal is None else batch.proximal
            kl = np.where(batch.sampled, kl_estimate(current, batch.reference, estimator), np.float32(0))
        stopped = np.array([reason != "length" for reason in batch.reasons], np.bool_)
        return cls(shaping.shaped(batch.scores, stopped), kl, control.coefficient)

    def rewards(self, batch: Batch) -> FloatArray:
        """Return the reward of each token, float32 [T]: the KL penalty, and the score at the last sampled one."""
        return flat(
            [
                shaped_rewards(float(score), self.kl[row], self.coefficient, batch.sampled[row])
                for score, row in zip(self.shaped, batch.rows(), strict=True)
            ]
        )

    def after(self, control: KLControl, batch: Batch) -> KLControl:
        """Return what sets the coefficient of the next batch."""
        return control.after(self._mean_kl(batch), len(batch)) if len(batch) else control

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return the means over a batch, under TRL's names; nothing of an empty one.

        Without a reference nothing is said of a KL to it.
        """
        if not len(batch):
            return {}
        mean_kl, shaped = self._mean_kl(batch), float(np.mean(self.shaped))
        told = {
            "objective/kl": mean_kl,
            "objective/kl_coef": self.coefficient,
            "objective/entropy": float(np.mean([float(-batch.logprobs[row].sum()) for row in batch.rows()])),
            "objective/non_score_reward": -self.coefficient * mean_kl,
            "objective/rlhf_reward": shaped - self.coefficient * mean_kl,
            "objective/scores": float(np.mean(batch.scores)),
            "objective/scores_std": float(np.std(batch.scores)),
            "objective/shaped_scores": shaped,
        }
        unsaid = OF_THE_REFERENCE if batch.reference is None else frozenset[str]()
        return {name: value for name, value in told.items() if name not in unsaid}

    def _mean_kl(self, batch: Batch) -> float:
        """Return the mean over responses, in nats a response."""
        return float(np.mean([float(self.kl[row].sum()) for row in batch.rows()]))


def controlled(kl: SupportsFloat | KLControl, estimator: KLEstimator) -> KLControl:
    """Return what sets the coefficient of a KL penalty: ``kl`` itself, if it is more than a number.

    Raises:
        ConfigError: it is neither, or there is no such estimator.
        ValueError: the coefficient is negative or not finite.
    """
    if estimator not in get_args(KLEstimator):
        raise ConfigError(f"kl_estimator must be one of {', '.join(get_args(KLEstimator))}, not {estimator!r}")
    if not isinstance(kl, SupportsFloat | FixedKL | AdaptiveKL):
        raise ConfigError(f"kl must be a number, or a controller such as oppo.AdaptiveKL, not {kl!r}")
    return kl if isinstance(kl, FixedKL | AdaptiveKL) else FixedKL(float(kl))


def state_of(control: KLControl, shaping: ScoreShaping) -> Mapping[str, Any]:
    """Return, as plain values, what was learned of KL and scores so far."""
    return {"kl": control.coefficient, "moments": asdict(shaping.moments)}


def restored(state: Mapping[str, Any], control: KLControl, shaping: ScoreShaping) -> tuple[KLControl, ScoreShaping]:
    """Return the two as they were when :func:`state_of` described them; a coefficient that is fixed stays."""
    if isinstance(control, AdaptiveKL):
        control = replace(control, initial=float(state["kl"]))
    return control, replace(shaping, moments=RunningMoments(**state["moments"]))
