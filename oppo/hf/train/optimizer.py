"""AdamW over the models that are trained, each at a learning rate of its own, matrices apart from vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from oppo.training import TrainerSettings


def adamw(settings: TrainerSettings, weights: Sequence[Sequence[nn.Parameter]]) -> torch.optim.AdamW:
    """Return the optimizer of the actor's weights and, if there are any, the critic's."""
    rate, critic_rate = settings.learning_rate, settings.critic_learning_rate
    rates = rate, rate if critic_rate is None else critic_rate
    groups = [
        {"params": parameters, "lr": peak, "peak": peak, "weight_decay": decay}
        for part, peak in zip(weights, rates, strict=False)
        for parameters, decay in (
            ([parameter for parameter in part if parameter.ndim >= 2], settings.weight_decay),
            ([parameter for parameter in part if parameter.ndim < 2], 0.0),
        )
        if parameters
    ]
    return torch.optim.AdamW(groups, betas=settings.betas, eps=settings.eps, fused=True)


def scale_learning_rates(optimizer: torch.optim.Optimizer, factor: float) -> None:
    """Set each learning rate to ``factor`` times its peak."""
    for group in optimizer.param_groups:
        group["lr"] = group["peak"] * factor
