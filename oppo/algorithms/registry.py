"""The algorithms that ``step.algorithm`` names. To add one, write its file and name it here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from oppo.algorithms.algorithm import Algorithm
from oppo.algorithms.dr_grpo import DrGRPO
from oppo.algorithms.grpo import GRPO
from oppo.algorithms.ppo import PPO
from oppo.algorithms.rloo import RLOO

ALGORITHMS: Final[Mapping[str, type[Algorithm]]] = {
    "ppo": PPO,
    "grpo": GRPO,
    "rloo": RLOO,
    "dr_grpo": DrGRPO,
}
