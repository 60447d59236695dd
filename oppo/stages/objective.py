"""The objective of a batch: the shaped score of each response, minus the penalty on its KL to the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, SupportsFloat, TypeAlias

import numpy as np

from oppo.errors import ConfigError
from oppo.estimators import AdaptiveKL, FixedKL, KLEstimator, kl_estimate, shaped_rewards
from oppo.events import Batch, BoolArray, Defer, Drop, FloatArray
from oppo.shaping import RunningMoments, ScoreShaping
from oppo.stages.batch_stage import BatchStage
from oppo.stages.scored_rollouts import LARGEST, NONFINITE, ScoredRollout, flat

KLControl: TypeAlias = FixedKL | AdaptiveKL

OF_THE_REFERENCE = frozenset({"objective/kl", "objective/kl_coef", "objective/non_score_reward"})
"""The metrics that are absent without a reference."""

LARGEST_SUM = LARGEST / 4
"""Of the sizes of a rollout's rewards and values: returns are at most their sum and 3 values, and the advantage over
the others of a group is at most 4 times the return."""


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """The objective of a batch of N rollouts and T tokens.

    Attributes:
        shaped: float32 [N], the shaped scores.
        kl: float32 [T], an estimate of each token's KL to the reference, in nats: that of the proximal policy if its
            log-probs are known; 0 for a token that was not sampled, and without a reference.
        coefficient: of the KL penalty.
        earned: float32 [T], the part of a shaped score that its tokens are known to have earned; ``None`` if that is
            known of no response.
    """

    shaped: FloatArray
    kl: FloatArray
    coefficient: float
    earned: FloatArray | None = None

    def rewards(self, batch: Batch) -> FloatArray:
        """Return the reward of each token, float32 [T]: what it earned, less the KL penalty.

        The last sampled token of a response earns what is left of the score: all of it, unless the scorer said more.
        """
        return flat(
            [
                shaped_rewards(
                    float(score),
                    self.kl[row],
                    self.coefficient,
                    batch.sampled[row],
                    None if self.earned is None else self.earned[row],
                )
                for score, row in zip(self.shaped, batch.rows(), strict=True)
            ]
        )

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return the means over a batch, under TRL's names; none of an empty one, none of a KL without a reference."""
        if not len(batch):
            return {}
        mean_kl, shaped = self.mean_kl(batch), float(np.mean(self.shaped))
        metrics = {
            "objective/kl": mean_kl,
            "objective/kl_coef": self.coefficient,
            "objective/entropy": float(np.mean([float(-batch.logprobs[row].sum()) for row in batch.sampled_rows()])),
            "objective/non_score_reward": -self.coefficient * mean_kl,
            "objective/rlhf_reward": shaped - self.coefficient * mean_kl,
            "objective/scores": float(np.mean(batch.scores)),
            "objective/scores_std": float(np.std(batch.scores)),
            "objective/shaped_scores": shaped,
        }
        absent = OF_THE_REFERENCE if batch.reference is None else frozenset[str]()
        return {name: value for name, value in metrics.items() if name not in absent}

    def mean_kl(self, batch: Batch) -> float:
        """Return the mean KL over the responses of a batch, nats per response."""
        return float(np.mean([float(self.kl[row].sum()) for row in batch.sampled_rows()]))


class AdaptiveObjective(BatchStage):
    """An advantage stage whose shaping of scores and KL coefficient adapt to each batch.

    A rollout whose rewards and values are too large for float32 is dropped before anything is estimated: whitening or a
    comparison would spread it.

    Attributes:
        mask_truncated: leave responses that ended at the length cap out of the loss. They stay in what others are
            compared with: the baseline of a group, the moments of whitening.
        kl_estimator: of each token's KL to the reference.
        shaping: of the scores, before they are rewards; replaced by its successor after each batch.
        control: of the coefficient of the KL penalty; replaced likewise.
    """

    kl_estimator: KLEstimator
    shaping: ScoreShaping
    control: KLControl
    mask_truncated: bool = False

    @property
    def refers(self) -> bool:
        """Whether log-probs of a reference are needed: there is a KL penalty."""
        return self.control.coefficient > 0

    def batch(
        self, rollouts: Sequence[ScoredRollout], dropped: Sequence[Drop] = (), deferred: Sequence[Defer] = ()
    ) -> Batch:
        """Return the training batch of these rollouts, in their order, with the loss mask of those that are trained."""
        batch = super().batch(rollouts, dropped, deferred)
        if not self.mask_truncated:
            return batch
        return replace(batch, sampled=batch.sampled & np.repeat(~truncated(batch), np.diff(batch.offsets)))

    def unfit(self, batch: Batch) -> Sequence[Drop]:
        """Return the drops of rollouts whose estimates float32 might not hold."""
        if not len(batch):
            return []
        with np.errstate(over="ignore", invalid="ignore"):
            objective = self._objective(batch, self.shaping.after(batch.scores))
            tokens = np.abs(objective.coefficient * objective.kl.astype(np.float64))
            tokens += 0 if objective.earned is None else np.abs(objective.earned)
            rewards = np.add.reduceat(tokens, batch.offsets[:-1]) + np.abs(objective.shaped)
            values = 0 if batch.values is None else np.where(batch.sampled, np.abs(batch.values), 0.0)
            totals = rewards + np.add.reduceat(np.broadcast_to(values, len(tokens)), batch.offsets[:-1])
        return [
            Drop(rollout, f"{NONFINITE} {'advantage' if rewards[row] <= LARGEST_SUM else 'reward'}", nonfinite=True)
            for row, rollout in enumerate(batch.rollouts)
            if not totals[row] <= LARGEST_SUM
        ]

    def objective(self, batch: Batch) -> Objective:
        """Return the objective of a batch without advantages, and adapt to it.

        The scores are shaped with the moments of this batch; the coefficient is that of the batches before it.
        """
        self.shaping = self.shaping.after(batch.scores)
        objective = self._objective(batch, self.shaping)
        if len(batch):
            self.control = self.control.after(objective.mean_kl(batch), len(batch))
        return objective

    def _objective(self, batch: Batch, shaping: ScoreShaping) -> Objective:
        kl, at = np.zeros(len(batch.tokens), np.float32), batch.sampled
        if batch.reference is not None:
            current = batch.logprobs if batch.proximal is None else batch.proximal
            kl[at] = kl_estimate(current[at], batch.reference[at], self.kl_estimator)
        lengths = np.array([len(row) for row in batch.sampled_rows()], np.int64)
        return Objective(
            shaping.shaped(batch.scores, ~truncated(batch), lengths),
            kl,
            self.control.coefficient,
            None if batch.token_rewards is None else np.float32(shaping.slope) * batch.token_rewards,
        )

    def state_dict(self) -> Mapping[str, Any]:
        """Return the KL coefficient and the moments of the scores."""
        return {"kl": self.control.coefficient, "moments": asdict(self.shaping.moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both; a fixed coefficient stays."""
        if isinstance(self.control, AdaptiveKL):
            self.control = replace(self.control, initial=float(state["kl"]))
        self.shaping = replace(self.shaping, moments=RunningMoments(**state["moments"]))


def controlled(kl: SupportsFloat | KLControl) -> KLControl:
    """Return the controller of a KL penalty: ``kl`` itself, or a fixed one for a number.

    Raises:
        ConfigError: ``kl`` is neither.
        ValueError: the coefficient is negative or not finite.
    """
    if not isinstance(kl, SupportsFloat | FixedKL | AdaptiveKL):
        raise ConfigError(f"kl must be a number, or a controller such as oppo.AdaptiveKL, not {kl!r}")
    return kl if isinstance(kl, FixedKL | AdaptiveKL) else FixedKL(float(kl))


def truncated(batch: Batch) -> BoolArray:
    """Return whether each response ended at the length cap: bool [N]."""
    return np.array([reason == "length" for reason in batch.reasons], np.bool_)
