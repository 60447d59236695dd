"""Rewards as scorers: a Python function, several rewards as one, and a service that is asked over HTTP."""

from oppo.rewards.called import RewardFailure, load_function
from oppo.rewards.combined import Rewards, Weighted
from oppo.rewards.function import PAUSES, FunctionReward, OnFailure
from oppo.rewards.load import load_reward
from oppo.rewards.per_token import ByCharacter
from oppo.token_rewards import TokenRewards

__all__ = [
    "PAUSES",
    "ByCharacter",
    "FunctionReward",
    "OnFailure",
    "RewardFailure",
    "Rewards",
    "TokenRewards",
    "Weighted",
    "load_function",
    "load_reward",
]
