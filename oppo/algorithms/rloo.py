"""RLOO: the baseline of a response is the mean of the others (Ahmadian et al. 2024, arXiv 2402.14740)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from oppo.algorithms.grpo import GroupAlgorithm
from oppo.estimators import GroupAdvantage
from oppo.training import Aggregation


@dataclass(frozen=True, kw_only=True)
class RLOO(GroupAlgorithm):
    """RLOO: a response is compared with the mean of the others of its group, the KL penalty included.

    The loss of a response is the sum of its tokens', as of one action, up to a constant factor.
    """

    compared: ClassVar[GroupAdvantage] = "leave_one_out"

    aggregation: Aggregation = "constant"
