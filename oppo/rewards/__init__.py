"""Rewards as scorers: a Python function, several rewards as one, and a service that is asked over HTTP."""

from oppo.returns import TokenRewards
from oppo.rewards.combined import OnDrop, Rewards, Weighted, load_reward
from oppo.rewards.function import PAUSES, ByCharacter, FunctionReward, OnFailure, RewardFailure, load_function

__all__ = [
    "PAUSES",
    "ByCharacter",
    "FunctionReward",
    "OnDrop",
    "OnFailure",
    "RewardFailure",
    "Rewards",
    "TokenRewards",
    "Weighted",
    "load_function",
    "load_reward",
]
