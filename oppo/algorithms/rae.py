"""RAE: advantages over a running mean by role, for agents that play several (SPIRAL: Liu et al. 2025)."""

from __future__ import annotations

from dataclasses import dataclass

from oppo.algorithms.base import ClippedAlgorithm, Roles
from oppo.algorithms.ppo import streamed
from oppo.declared import Fraction, NonNegative, PositiveCount, setting
from oppo.events import StepReport
from oppo.graph import Graph
from oppo.stages import RoleBaseline
from oppo.training import Aggregation


@dataclass(frozen=True, kw_only=True)
class RAE(ClippedAlgorithm):
    """RAE: a response is compared with the running mean of its role; neither a critic nor a group.

    Liu et al. 2025, arXiv 2506.24119 (SPIRAL), role-conditioned advantage estimation.
    """

    kl: NonNegative = 0.0
    aggregation: Aggregation = "constant"
    samples: PositiveCount = setting(1, "responses to each prompt; `step.batch` and `step.overcommit` count prompts")
    decay: Fraction = setting(0.95, "of the running mean: the share that stays of it after each response")

    @property
    def responses(self) -> int:
        return self.samples

    def graph(self, roles: Roles) -> Graph[StepReport]:
        kl, distill = self.reward_kl, self.distill_advantage
        estimator = RoleBaseline(self.decay, kl, self.kl_estimator, self.shaping, self.mask_truncated, distill)
        return streamed("rae", roles, estimator, self.samples)
