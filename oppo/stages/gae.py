"""GAE: scored rollouts in, one training batch out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import SupportsFloat

import numpy as np

from oppo.declared import Fraction, require_declared
from oppo.errors import ConfigError, ProtocolError
from oppo.estimators import KLEstimator, gae, returns_to_go, whiten
from oppo.events import Batch, FloatArray
from oppo.shaping import ScoreShaping
from oppo.stages.objective import AdaptiveObjective, KLControl, controlled, truncated


@dataclass(eq=False)
class GAE(AdaptiveObjective):
    """Joins the results of the scorers and estimates advantages (Schulman et al. 2016, arXiv 1506.02438).

    The reward of a token is ``-kl * (estimate of its KL to the reference)``, plus the shaped score on the last sampled
    token, or what each token earned of it if the scorer says so (:class:`~oppo.token_rewards.TokenRewards`); the KL is
    that of the proximal policy if its log-probs are connected. Over a conversation all this runs over its sampled
    tokens, one decay each. A rollout with a result or an estimate that is not finite is dropped and does not affect the
    others.

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
        bootstrap_truncated: the value of the state after a response that ended at the length cap is what the critic
            gives, not 0, as if the response went on (partial-episode bootstrapping: Pardo et al. 2018, "Time Limits in
            Reinforcement Learning", arXiv 1712.00378, section 3).
        mask_truncated: leave such responses out of the loss; see :class:`AdaptiveObjective`.

    Raises:
        ConfigError: a value is out of range, there is no such estimator, or truncated responses are both bootstrapped
            and left out.
        ValueError: the coefficient of the KL penalty is negative or not finite.
    """

    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    kl: SupportsFloat | KLControl = 0.05
    kl_estimator: KLEstimator = "k1"
    shaping: ScoreShaping = field(default_factory=ScoreShaping)
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    bootstrap_truncated: bool = False
    mask_truncated: bool = False
    control: KLControl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)
        self.control = controlled(self.kl)
        if self.bootstrap_truncated and self.mask_truncated:
            raise ConfigError(
                "bootstrap_truncated says what a truncated response learns, and mask_truncated leaves it out of the "
                "loss: leave one of the two out"
            )

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Return what is wrong if a reference or a critic is needed, and not connected."""
        fault = "has bootstrap_truncated, which needs a critic: connect value=stream, or leave bootstrap_truncated out"
        lacking = self.bootstrap_truncated and "value" not in named
        return [*super().faults(stages, named), *([fault] if lacking else [])]

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
        """Return the advantages, and the critic's targets, ``None`` without one; 0 for tokens that were not sampled."""
        advantages, returns = np.zeros((2, len(batch.tokens)), np.float32)
        if batch.values is None:
            for row in batch.sampled_rows():
                advantages[row] = returns_to_go(rewards[row], self.gamma)
            return advantages, None
        for row, last_value in zip(batch.sampled_rows(), self._last_values(batch), strict=True):
            advantages[row], returns[row] = gae(rewards[row], batch.values[row], self.gamma, self.lam, last_value)
        return advantages, returns

    def _last_values(self, batch: Batch) -> Sequence[float]:
        if not self.bootstrap_truncated:
            return [0.0] * len(batch)
        if batch.last_values is None:
            raise ProtocolError(
                "bootstrap_truncated needs the critic's value of the state after the last token: expected n + 1 values "
                "of a response of n tokens, as oppo.hf.ValueModel gives, and got n; leave bootstrap_truncated out, or "
                "return one more"
            )
        return [float(value) for value in np.where(truncated(batch), batch.last_values, 0.0)]
