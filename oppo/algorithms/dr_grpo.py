"""Dr. GRPO: a response is compared with the mean of its group, unscaled (Liu et al. 2025, arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oppo.algorithms.grpo import GroupAlgorithm
from oppo.declared import NonNegative
from oppo.estimators import GroupAdvantage


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GroupAlgorithm):
    """Dr. GRPO: scores are centred within the group, and there is no KL penalty (section 3.2)."""

    compared: ClassVar[GroupAdvantage] = "centred"

    kl: NonNegative = 0.0
