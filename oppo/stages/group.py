"""GroupRelative: groups of scored rollouts in, one training batch out, without a critic."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import SupportsFloat

import numpy as np

from oppo.declared import require_declared
from oppo.errors import ConfigError
from oppo.estimators import GroupAdvantage, KLEstimator, group_advantages
from oppo.events import Batch, Drop, FloatArray
from oppo.shaping import ScoreShaping
from oppo.stages.objective import AdaptiveObjective, KLControl, controlled

ALONE = "left alone in its group"
"""Reason of a drop for a response whose siblings were all dropped: it cannot be compared."""


@dataclass(eq=False)
class GroupRelative(AdaptiveObjective):
    """Joins the results of the scorers and compares the responses to each prompt with one another.

    The return of a response is its shaped score minus ``kl`` times its KL to the reference. Its advantage, the same for
    each sampled token, follows from the returns of its group; rewards at tokens count by their sum. The batch has no
    critic's returns. A response that is dropped, or has a result or a return that is not finite, leaves its group; one
    left alone is dropped too. The inputs by name are those of :class:`BatchStage`.

    Attributes:
        advantage: ``leave_one_out`` (RLOO), ``standardised`` (GRPO) or ``centred`` (Dr. GRPO); see
            :func:`oppo.estimators.group_advantages`.
        kl: coefficient of the KL penalty in the return of a response, as in RLOO: a number, or a controller that adapts
            it to a target. GRPO has its KL in the loss instead, ``ClippedLoss.kl``: standardising gives a KL the same
            size at any coefficient, and where scores tie only the KL is left. Both need a reference.
        kl_estimator: ``k1``, ``k2`` or ``k3`` (Schulman, "Approximating KL divergence", 2020).
        shaping: of the scores, before they are rewards; replaced by its successor after each batch.
        mask_truncated: leave responses that ended at the length cap out of the loss; see :class:`AdaptiveObjective`.

    Raises:
        ConfigError: there is no such estimator, or ``kl`` is no coefficient or would be standardised.
        ValueError: the coefficient of the KL penalty is negative or not finite.
    """

    advantage: GroupAdvantage = "standardised"
    kl: SupportsFloat | KLControl = 0.0
    kl_estimator: KLEstimator = "k1"
    shaping: ScoreShaping = field(default_factory=ScoreShaping)
    mask_truncated: bool = False
    control: KLControl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)
        self.control = controlled(self.kl)
        if self.advantage == "standardised" and self.refers:
            raise ConfigError(
                f"advantage = 'standardised' cannot have a KL in the reward, got kl = {self.kl}: where the scores of a "
                "group tie, only the KL is standardised, to full size at any coefficient; put it into the "
                'loss, with algorithm.kl_in="loss" or ClippedLoss(kl=..., kl_estimator="k3"), or choose \'centred\' or '
                "'leave_one_out'"
            )

    def unfit(self, batch: Batch) -> Sequence[Drop]:
        """Return the drops of what float32 might not hold, and of rollouts that are then alone in their group."""
        drops = list(super().unfit(batch))
        gone = {drop.rollout for drop in drops}
        prompts = [response.prompt for response in batch.responses if response.prompt.rollout not in gone]
        sizes = Counter(prompt.group for prompt in prompts)
        return [*drops, *(Drop(prompt.rollout, ALONE) for prompt in prompts if sizes[prompt.group] == 1)]

    def estimated(self, batch: Batch) -> Batch:
        """Return the batch with rewards and advantages, and update the KL controller from it."""
        objective = self.objective(batch)
        rewards = objective.rewards(batch)
        returns = np.array([rewards[row].sum(dtype=np.float64) for row in batch.sampled_rows()], np.float32)
        group_of = np.array([response.prompt.group for response in batch.responses], np.int64)
        groups = [np.flatnonzero(group_of == group) for group in np.unique(group_of)]
        relative = np.zeros(len(batch), np.float32)
        for members in groups:
            relative[members] = group_advantages(returns[members], self.advantage)
        advantages = np.where(batch.sampled, np.repeat(relative, np.diff(batch.offsets)), np.float32(0))
        metrics = {**objective.metrics(batch), **_spread([objective.shaped[members] for members in groups])}
        return replace(batch, rewards=rewards, advantages=advantages, metrics=metrics)


def _spread(groups: Sequence[FloatArray]) -> Mapping[str, float]:
    """Return the mean deviation of the scores of a group, and the share of groups where it is 0."""
    if not groups:
        return {}
    deviations = [float(scores.std(ddof=1, dtype=np.float64)) for scores in groups]
    return {
        "objective/group_std": float(np.mean(deviations)),
        "objective/frac_zero_std": float(np.mean([not deviation for deviation in deviations])),
    }
