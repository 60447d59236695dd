"""GAE: scored rollouts in, one training batch out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

from oppo.declared import require_declared
from oppo.errors import ConfigError
from oppo.estimators import KLEstimator, gae, whiten
from oppo.events import Batch, Defer, Drop, FloatArray, RolloutEvent, Scored
from oppo.graph import Receiver, Sender
from oppo.shaping import ScoreShaping
from oppo.stages.gather import ScoredRollouts
from oppo.stages.objective import KLControl, Objective, controlled, restored, state_of
from oppo.stages.rows import Row, flat, unestimated


@dataclass(eq=False)
class GAE:
    """Joins what the scorers said of each finished rollout and estimates advantages (Schulman et al. 2016).

    The reward of a token is ``-kl * (estimate of its KL to the reference)``, plus the shaped score on the last sampled
    token; the KL is that of the proximal policy, where its log-probs are known. A rollout of which something said is
    not finite is dropped alone: nothing of it reaches the others.

    Attributes:
        gamma: discount.
        lam: bias-variance trade of the estimator.
        kl: coefficient of the KL penalty: a number, or a controller that adapts it to a target.
        kl_estimator: ``k1``, ``k2`` or ``k3`` (Schulman, "Approximating KL divergence", 2020).
        shaping: what is made of the scores first; replaced by its successor after each batch.
        whiten_rewards: scale the rewards of a batch to unit variance, their mean kept.
        whiten_advantages: scale the advantages of a batch to zero mean and unit variance.

    Raises:
        ConfigError: a value is out of range, or there is no such estimator.
        ValueError: the coefficient of the KL penalty is negative or not finite.
    """

    gamma: float = 1.0
    lam: float = 0.95
    kl: SupportsFloat | KLControl = 0.05
    kl_estimator: KLEstimator = "k1"
    shaping: ScoreShaping = field(default_factory=ScoreShaping)
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    _control: KLControl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)
        for name, value in (("gamma", self.gamma), ("lam", self.lam)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} must be a number from 0 to 1, not {value!r}")
        self._control = controlled(self.kl, self.kl_estimator)

    def state_dict(self) -> Mapping[str, Any]:
        """Return what was learned of KL and scores so far."""
        return state_of(self._control, self.shaping)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what another estimator had learned."""
        self._control, self.shaping = restored(state, self._control, self.shaping)

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        reference: Receiver[Scored[FloatArray] | Drop],
        score: Receiver[Scored[float] | Drop],
        value: Receiver[Scored[FloatArray] | Drop],
        /,
        *,
        out: Sender[Batch],
        proximal: Receiver[Scored[FloatArray] | Drop] | None = None,
    ) -> None:
        """Send the step's batch as soon as every finished rollout is scored; nothing when there was no rollout.

        ``proximal`` has log-probs under the weights that are about to be updated, which corrections for stale tokens
        need.
        """
        gathered = await ScoredRollouts.of(rollout, score, reference=reference, values=value, proximal=proximal)
        if gathered:
            await out.send(self.batch(*gathered.in_order()))

    def batch(self, rows: Sequence[Row], dropped: Sequence[Drop] = (), deferred: Sequence[Defer] = ()) -> Batch:
        """Return the training batch of these rows, in the order given, and let the KL controller learn from it.

        Raises:
            ConfigError: a row has no values.
        """
        batch = unestimated(rows, dropped, deferred)
        values = batch.values
        if values is None:
            raise ConfigError("GAE estimates advantages from the values of a critic, and there are none: connect one")
        self.shaping = self.shaping.after(batch.scores)
        objective = Objective.of(batch, self.shaping, self._control, self.kl_estimator)
        self._control = objective.after(self._control, batch)
        rewards = objective.rewards(batch)
        if self.whiten_rewards:
            rewards = whiten(rewards, batch.sampled, shift_mean=False)
        estimates = [gae(rewards[row], values[row], self.gamma, self.lam) for row in batch.rows()]
        advantages = flat([advantage for advantage, _ in estimates])
        return replace(
            batch,
            rewards=rewards,
            advantages=whiten(advantages, batch.sampled) if self.whiten_advantages else advantages,
            returns=flat([total for _, total in estimates]),
            metrics=objective.metrics(batch),
        )
