"""The algorithms that ``step.algorithm`` names. To add one, write its file and name it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oppo.algorithms.algorithm import Algorithm
from oppo.algorithms.dapo import DAPO
from oppo.algorithms.dr_grpo import DrGRPO
from oppo.algorithms.grpo import GRPO
from oppo.algorithms.gspo import GSPO
from oppo.algorithms.online_dpo import OnlineDPO
from oppo.algorithms.ppo import PPO
from oppo.algorithms.reinforce_pp import ReinforcePP
from oppo.algorithms.rloo import RLOO

ALGORITHMS: Final[Mapping[str, type[Algorithm]]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "rloo": RLOO,
    "dr_grpo": DrGRPO,
    "reinforce_pp": ReinforcePP,
    "dapo": DAPO,
    "gspo": GSPO,
    "online_dpo": OnlineDPO,
}
