"""GAE: scored rollouts in, one training batch out."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import SupportsFloat

from oppo.declared import Fraction, require_declared
from oppo.errors import ConfigError
from oppo.estimators import KLEstimator, gae, returns_to_go, whiten
from oppo.events import Batch, FloatArray
from oppo.shaping import ScoreShaping
from oppo.stages.objective import AdaptiveObjective, KLControl, controlled
from oppo.stages.scored_rollouts import flat


@dataclass(eq=False)
class GAE(AdaptiveObjective):
    """Joins the results of the scorers and estimates advantages (Schulman et al. 2016, arXiv 1506.02438).

    The reward of a token is ``-kl * (estimate of its KL to the reference)``, plus the shaped score on the last sampled
    token, or what each token earned of it if the scorer says so (:class:`~oppo.token_rewards.TokenRewards`); the KL is
    that of the proximal policy if its log-probs are connected. A rollout with a result that is not finite is dropped
    and does not affect the others.

    The inputs by name are those of :class:`BatchStage`. Without a critic, ``value=``, the advantage of a token is the
    discounted sum of the rewards from it on, as in REINFORCE++ (Hu 2025, arXiv 2501.03262).

    Attributes:
        gamma: discount.
        lam: bias-variance trade of the estimator.
        kl: coefficient of the KL penalty: a number, or a controller that adapts it to a target.
        kl_estimator: ``k1``, ``k2`` or ``k3`` (Schulman, "Approximating KL divergence", 2020).
        shaping: of the scores, before they are rewards; replaced by its successor after each batch.
        whiten_rewards: scale the rewards of a batch to unit variance, their mean kept.
        whiten_advantages: scale the advantages of a batch to zero mean and unit variance.

    Raises:
        ConfigError: a value is out of range, or there is no such estimator.
        ValueError: the coefficient of the KL penalty is negative or not finite.
    """

    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    kl: SupportsFloat | KLControl = 0.05
    kl_estimator: KLEstimator = "k1"
    shaping: ScoreShaping = field(default_factory=ScoreShaping)
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    control: KLControl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)
        self.control = controlled(self.kl)

    def estimated(self, batch: Batch) -> Batch:
        """Return the batch with rewards, advantages and returns, and update the KL controller from it."""
        objective = self.objective(batch)
        rewards = objective.rewards(batch)
        if self.whiten_rewards:
            rewards = whiten(rewards, batch.sampled, shift_mean=False)
        advantages, returns = self._estimates(batch, rewards)
        return replace(
            batch,
            rewards=rewards,
            advantages=whiten(advantages, batch.sampled) if self.whiten_advantages else advantages,
            returns=returns,
            metrics=objective.metrics(batch),
        )

    def _estimates(self, batch: Batch, rewards: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        """Return the advantages of all tokens, and the critic's targets; ``None`` without a critic."""
        values = batch.values
        if values is None:
            return flat([returns_to_go(rewards[row], self.gamma) for row in batch.rows()]), None
        estimates = [gae(rewards[row], values[row], self.gamma, self.lam) for row in batch.rows()]
        return flat([advantage for advantage, _ in estimates]), flat([total for _, total in estimates])
