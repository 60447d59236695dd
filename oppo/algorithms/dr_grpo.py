"""Dr. GRPO: GRPO without the deviation of a group and without the length of a response (arXiv 2503.20783)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oppo.algorithms.grpo import GroupAlgorithm
from oppo.declared import NonNegative
from oppo.estimators import GroupAdvantage
from oppo.training import Aggregation


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GroupAlgorithm):
    """Dr. GRPO: scores are centred within the group; the loss is divided by a constant; no KL penalty.

    Liu et al. 2025, section 3.2: dividing by the deviation of a group favours prompts whose scores are nearly alike,
    and dividing by the length of a response favours long wrong ones.
    """

    compared: ClassVar[GroupAdvantage] = "centred"

    kl: NonNegative = 0.0
    aggregation: Aggregation = "constant"
