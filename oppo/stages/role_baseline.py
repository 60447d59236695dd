"""Advantages over a running mean of the returns in a role, without a group or a critic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, SupportsFloat

import numpy as np

from oppo.declared import Fraction, NonNegative, validated
from oppo.errors import ConfigError
from oppo.events import Batch
from oppo.returns import KLEstimator, ScoreShaping
from oppo.stages.advantage import AdaptiveObjective, KLControl, controlled


@dataclass(eq=False)
@validated(ConfigError)
class RoleBaseline(AdaptiveObjective):
    """Joins the results of the scorers and compares a return with the running mean of its role.

    ``A = R - b``, then ``b = decay b + (1 - decay) R``, from 0 on, with a ``b`` for each role, in the order of
    rollouts, whenever they ended (role-conditioned advantage estimation: Liu et al. 2025, arXiv 2506.24119). The
    return ``R`` of an agent in a role, or of a response without one, is its shaped score minus ``kl`` times its KL to
    the reference; all its sampled tokens have its advantage. It has the named inputs of
    :class:`~oppo.stages.batch.BatchStage`.

    Attributes:
        decay: of the mean, in [0, 1].
        kl, kl_estimator, shaping, mask_truncated, distill: as of :class:`~oppo.stages.GroupRelative`.
        baselines: the mean of each role so far; a checkpoint holds them.

    Raises:
        ConfigError: a value is out of range.
    """

    decay: Fraction = 0.95
    kl: SupportsFloat | KLControl = 0.0
    kl_estimator: KLEstimator = "k1"
    shaping: ScoreShaping = field(default_factory=ScoreShaping)
    mask_truncated: bool = False
    distill: NonNegative = 0.0
    baselines: dict[str, float] = field(default_factory=dict, init=False)
    control: KLControl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.control = controlled(self.kl)

    def estimated(self, batch: Batch) -> Batch:
        """Return the batch with rewards and advantages, and update the baselines and the KL controller from it."""
        objective = self.objective(batch)
        rewards, at = objective.rewards(batch), batch.sampled_rows()
        advantages = np.zeros(len(batch.tokens), np.float32)
        prompts = [response.prompt for response in batch.responses]
        for first, *further in sorted(batch.conversations(), key=lambda rows: prompts[rows[0]].first):
            kl = sum(float(objective.kl[at[row]].sum(dtype=np.float64)) for row in further)
            earned = float(rewards[at[first]].sum(dtype=np.float64)) - objective.coefficient * kl
            role = prompts[first].role
            baseline = self.baselines.get(role, 0.0)
            for row in (first, *further):
                advantages[at[row]] = earned - baseline
            self.baselines[role] = self.decay * baseline + (1.0 - self.decay) * earned
        means = {f"roles/{role}/baseline": mean for role, mean in sorted(self.baselines.items()) if role}
        return replace(batch, rewards=rewards, advantages=advantages, metrics={**objective.metrics(batch), **means})

    def state_dict(self) -> Mapping[str, Any]:
        return {**super().state_dict(), "baselines": dict(self.baselines)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.baselines = dict(state["baselines"])
