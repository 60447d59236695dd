"""Online DPO: the reward ranks two responses of the policy, and DPO learns from the pair (arXiv 2402.04792)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from oppo.algorithms.algorithm import Roles
from oppo.algorithms.grpo import grpo
from oppo.declared import Positive, require_declared, setting
from oppo.errors import ConfigError
from oppo.events import StepReport
from oppo.graph import Graph
from oppo.stages import GroupRelative

if TYPE_CHECKING:
    from oppo.losses import Loss


@dataclass(frozen=True, kw_only=True)
class OnlineDPO:
    """Online DPO: the reward ranks two responses to each prompt, and the loss is DPO's (Guo et al. 2024)."""

    has_critic: ClassVar[bool] = False

    beta: Positive = setting(0.1, "how much the policy is held to the reference")
    mask_truncated: bool = setting(
        default=False, description="leave pairs with a response that ended at max_new_tokens out of the loss"
    )

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)

    @property
    def responses(self) -> int:
        """A pair."""
        return 2

    @property
    def refers(self) -> bool:
        """The loss compares the policy with the reference."""
        return True

    @property
    def corrects(self) -> bool:
        """Stale tokens need no correction: DPO does not ask who wrote a response."""
        return False

    def graph(self, roles: Roles) -> Graph[StepReport]:
        """Return the graph of a step."""
        return grpo(
            policy=roles.policy,
            reference=roles.reference,
            reward=roles.reward,
            trainer=roles.trainer,
            admission=roles.admission,
            samples=self.responses,
            advantage=GroupRelative("centred", mask_truncated=self.mask_truncated),
            chunks=roles.chunks,
        )

    def loss(self) -> Loss:
        """Return the loss of the policy."""
        from oppo.losses import PairwiseLoss  # noqa: PLC0415 - torch takes seconds to import

        return PairwiseLoss(beta=self.beta)
