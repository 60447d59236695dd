"""Rewards as scorers: a Python function, several rewards as one, and a service that is asked over HTTP."""

from oppo.returns import TokenRewards
from oppo.rewards.combined import OnDrop, Rewards, Weighted, load_reward
from oppo.rewards.function import (
    PAUSES,
    ByCharacter,
    ByTurn,
    FunctionReward,
    OnFailure,
    RewardFailure,
    RewardInputs,
    TrainerState,
    load_function,
    text_of,
)

__all__ = [
    "PAUSES",
    "ByCharacter",
    "ByTurn",
    "FunctionReward",
    "OnDrop",
    "OnFailure",
    "RewardFailure",
    "RewardInputs",
    "Rewards",
    "TokenRewards",
    "TrainerState",
    "Weighted",
    "load_function",
    "load_reward",
    "text_of",
]
