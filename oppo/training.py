"""Settings of the optimisation; torch-free, so that a configuration can be checked without loading torch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

from annotated_types import Ge, Lt

from oppo.declared import (
    Count,
    FromList,
    LearningRate,
    Limit,
    NonNegative,
    Positive,
    PositiveCount,
    Seed,
    changed,
    require_declared,
    setting,
)
from oppo.errors import ConfigError

LearningRateSchedule: TypeAlias = Literal["constant", "constant_with_warmup", "linear", "cosine"]
Aggregation: TypeAlias = Literal["tokens", "responses", "constant"]
"""How the losses of tokens become the loss of a minibatch; see :meth:`oppo.losses.Inputs.mean`."""
Beta: TypeAlias = Annotated[float, Ge(0), Lt(1)]

OF_THE_CRITIC = frozenset({"critic_learning_rate", "critic_warmup"})
"""The settings that need a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """Settings of the optimisers of actor and critic; the defaults are those of TRL 1.12, with four exceptions.

    ``eps`` is 1e-5 instead of 1e-8, as in most PPO (Huang et al. 2022, "The 37 implementation details of PPO", detail
    3): steps stay small while the second moments are small. ``schedule`` is constant instead of linear, so that nothing
    depends on a number of steps guessed at the start. ``gradient_checkpointing`` is off instead of on: it costs time,
    and only models that do not fit otherwise need it. ``seed`` is 0 instead of 42.

    A trunk that actor and critic share is trained, scheduled and clipped as a part of the actor, and the critic's
    warm-up trains its head only. The two models' gradients are clipped separately, so that the large ones of an
    untrained critic do not shrink the actor's step; a ``max_grad_norm`` of ``inf`` clips nothing.

    Raises:
        ConfigError: a value is out of range.
    """

    learning_rate: LearningRate = setting(3e-6, "of AdamW, for the actor")
    critic_learning_rate: LearningRate | None = setting(None, "the actor's when absent; a shared trunk has the actor's")
    critic_warmup: Count = setting(
        0, "updates at the beginning that train the critic only (on a shared trunk: its head)"
    )
    epochs: PositiveCount = setting(4, "passes over each batch")
    minibatches: PositiveCount = setting(1, "optimizer steps in each pass")
    max_grad_norm: Limit = setting(1.0, "each model's gradient is scaled down to this norm")
    weight_decay: NonNegative = setting(0.0, "of AdamW, for matrices only")
    betas: Annotated[tuple[Beta, Beta], FromList()] = setting((0.9, 0.999), "of AdamW")
    eps: Positive = setting(1e-5, "of AdamW")
    schedule: LearningRateSchedule = setting("constant", "a transformers scheduler, such as constant, linear or cosine")
    warmup_steps: Count = setting(0, "updates over which the learning rate grows from 0; not with `constant`")
    total_steps: PositiveCount | None = setting(
        None, "updates in the run; `linear` and `cosine` reach 0 there and need it"
    )
    gradient_checkpointing: Count = setting(
        0, "recompute every n-th layer in the backward pass, to save memory: 1 is all layers, 0 none"
    )
    micro_batch_tokens: PositiveCount = setting(
        4096,
        "at most so many tokens, padding included, in a forward pass; a longer row gets a pass of its own",
    )
    seed: Seed = setting(0, "keys, with the number of the update, how rows are shuffled into minibatches")

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)
        self._require_schedule()

    def require_no_critic(self) -> None:
        """Require the defaults for the settings that need a critic.

        Raises:
            ConfigError: one of them differs.
        """
        for name, value in changed(self, OF_THE_CRITIC).items():
            raise ConfigError(
                f"{name} = {value} is about a critic, and there is none: leave it out, or give the trainer a critic"
            )

    def _require_schedule(self) -> None:
        if self.schedule == "constant" and self.warmup_steps:
            raise ConfigError(
                f"schedule 'constant' has no warm-up, so warmup_steps cannot be {self.warmup_steps}: leave it out, or "
                "use 'constant_with_warmup'"
            )
        if self.schedule in {"linear", "cosine"} and self.total_steps is None:
            raise ConfigError(f"schedule {self.schedule!r} ends at total_steps, so total_steps must be given")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"warmup_steps must be fewer than the steps of the run ({self.total_steps}), not {self.warmup_steps}"
            )

    def learning_rate_factor(self, update: int) -> float:
        """Return the factor of the learning rates in an update, counted from 0.

        It depends on the update's number alone, so a resumed run needs no state for it. The formulas are those of
        ``transformers.get_scheduler``, in which the first warm-up step has factor 0.
        """
        if update < self.warmup_steps:
            return update / self.warmup_steps
        if self.total_steps is None or self.schedule in {"constant", "constant_with_warmup"}:
            return 1.0
        progress = min(1.0, (update - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
