"""REINFORCE++: PPO without a critic; returns are whitened over the batch (Hu 2025, arXiv 2501.03262)."""

from __future__ import annotations

from dataclasses import dataclass

from oppo.algorithms.algorithm import Roles
from oppo.algorithms.clipped import ClippedAlgorithm
from oppo.algorithms.ppo import ppo
from oppo.declared import Fraction, setting
from oppo.events import StepReport
from oppo.graph import Graph
from oppo.stages import GAE


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(ClippedAlgorithm):
    """REINFORCE++: PPO without a critic; the returns of a batch, KL penalty included, are whitened."""

    gamma: Fraction = setting(1.0, "discount")

    @property
    def responses(self) -> int:
        """One response to each prompt."""
        return 1

    def graph(self, roles: Roles) -> Graph[StepReport]:
        """Return the graph of a step."""
        return ppo(
            policy=roles.policy,
            reference=roles.reference,
            reward=roles.reward,
            trainer=roles.trainer,
            admission=roles.admission,
            advantage=GAE(
                gamma=self.gamma,
                kl=self.reward_kl,
                kl_estimator=self.kl_estimator,
                shaping=self.shaping,
                mask_truncated=self.mask_truncated,
            ),
            proximal=roles.proximal,
            chunks=roles.chunks,
        )
