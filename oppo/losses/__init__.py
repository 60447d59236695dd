"""Losses: the protocol, PPO's losses, and their terms.

``HfTrainer(actor, loss=...)`` takes any :class:`Loss`. Importing this package loads torch.
"""

from oppo.losses.distribution import SupportIndex, entropies, token_logprobs
from oppo.losses.pairs import PairwiseLoss
from oppo.losses.ppo import ClippedLoss, PPOLoss, default_loss, importance_weights
from oppo.losses.protocol import Evaluated, Input, Inputs, Loss, Unit, Whole, means
from oppo.losses.sequence import SequenceLoss
from oppo.losses.terms import clipped_tokens, kl_loss, masked_mean, policy_loss, value_loss

__all__ = [
    "ClippedLoss",
    "Evaluated",
    "Input",
    "Inputs",
    "Loss",
    "PPOLoss",
    "PairwiseLoss",
    "SequenceLoss",
    "SupportIndex",
    "Unit",
    "Whole",
    "clipped_tokens",
    "default_loss",
    "entropies",
    "importance_weights",
    "kl_loss",
    "masked_mean",
    "means",
    "policy_loss",
    "token_logprobs",
    "value_loss",
]
