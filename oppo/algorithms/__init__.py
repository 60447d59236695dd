"""The algorithms that ``step.algorithm`` names: settings, recipe and loss of each. To add one, name it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oppo.algorithms.base import Algorithm
from oppo.algorithms.distill import Distill
from oppo.algorithms.group import DAPO, GRPO, GSPO, RAE, RLOO, DrGRPO, OnlineDPO
from oppo.algorithms.ppo import PPO, ReinforcePP

ALGORITHMS: Final[Mapping[str, type[Algorithm]]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "rloo": RLOO,
    "dr_grpo": DrGRPO,
    "reinforce_pp": ReinforcePP,
    "dapo": DAPO,
    "gspo": GSPO,
    "online_dpo": OnlineDPO,
    "rae": RAE,
    "distill": Distill,
}
