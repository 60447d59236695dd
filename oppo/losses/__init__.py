"""Losses: the protocol, PPO's losses, and their terms.

``HfTrainer(actor, loss=...)`` takes any :class:`Loss`. Importing this package loads torch.
"""

from oppo.losses.base import Divided, Divisor, Input, Inputs, Loss, LossValue, Unit, Whole, means
from oppo.losses.policy import ClippedLoss, PairwiseLoss, PPOLoss, SequenceLoss, default_loss, importance_weights
from oppo.losses.terms import (
    SupportIndex,
    divergences,
    entropies,
    kl_losses,
    masked_mean,
    policy_losses,
    surrogate_losses,
    token_logprobs,
    top_logprobs,
    value_loss,
)

__all__ = [
    "ClippedLoss",
    "Divided",
    "Divisor",
    "Input",
    "Inputs",
    "Loss",
    "LossValue",
    "PPOLoss",
    "PairwiseLoss",
    "SequenceLoss",
    "SupportIndex",
    "Unit",
    "Whole",
    "default_loss",
    "divergences",
    "entropies",
    "importance_weights",
    "kl_losses",
    "masked_mean",
    "means",
    "policy_losses",
    "surrogate_losses",
    "token_logprobs",
    "top_logprobs",
    "value_loss",
]
