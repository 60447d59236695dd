"""What can be chosen about the optimisation; torch-free, so that a configuration can be checked without loading it."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Literal, TypeAlias, get_args

from oppo.errors import ConfigError
from oppo.numeric import require_numbers, require_range

Schedule: TypeAlias = Literal["constant", "constant_with_warmup", "linear", "cosine"]

OF_THE_CRITIC = frozenset({"critic_learning_rate", "critic_warmup"})
"""The settings that mean nothing without a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSettings:
    """How actor and critic are optimised, whatever the loss; the defaults are TRL 1.12's, where it has any, but four.

    ``eps`` is 1e-5 instead of 1e-8, as in most PPO (Huang et al. 2022, "The 37 implementation details of PPO", detail
    3): steps stay small while the second moments are. ``schedule`` is constant instead of linear, so that nothing
    depends on a number of steps that was guessed at the start. ``gradient_checkpointing`` is off instead of on: it
    costs time, and is needed by models that do not fit otherwise. ``seed`` is 0 instead of 42.

    Attributes:
        learning_rate: of AdamW, for the actor.
        critic_learning_rate: for the critic; the actor's when ``None``. A shared trunk has the actor's.
        epochs: passes over each batch.
        minibatches: optimizer steps in each pass.
        critic_warmup: the first updates, so many, train the critic only; of one that shares the actor's trunk, its
            head only.
        max_grad_norm: each model's gradient is scaled down to this norm; ``inf`` leaves it alone. The two models are
            clipped apart, so that the large gradients of an untrained critic do not shrink the actor's step. A shared
            trunk is clipped as a part of the actor.
        weight_decay: of AdamW, for matrices only.
        betas, eps: of AdamW.
        schedule: shape of the learning rate over the run, as of the same name in ``transformers.get_scheduler``.
        warmup_steps: updates over which the learning rate grows from 0; not with ``constant``.
        total_steps: updates in the run; ``linear`` and ``cosine`` reach 0 there and need it.
        gradient_checkpointing: recompute every n-th layer in the backward pass, to save memory; 1: all, 0: none.
        micro_batch_tokens: at most so many, padding included, in one forward pass; a longer row gets a pass of its own.
        seed: keys, with the number of the update, how rows are shuffled into minibatches.

    Raises:
        ConfigError: a value is out of range.
    """

    learning_rate: float = 3e-6
    critic_learning_rate: float | None = None
    epochs: int = 4
    minibatches: int = 1
    critic_warmup: int = 0
    max_grad_norm: float = 1.0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-5
    schedule: Schedule = "constant"
    warmup_steps: int = 0
    total_steps: int | None = None
    gradient_checkpointing: int = 0
    micro_batch_tokens: int = 4096
    seed: int = 0

    def __post_init__(self) -> None:
        require_numbers(self, infinite=["max_grad_norm"], error=ConfigError)
        for name in ("epochs", "minibatches", "micro_batch_tokens"):
            require_range(name, getattr(self, name), at_least=1, error=ConfigError)
        for name in (
            "learning_rate",
            "critic_warmup",
            "gradient_checkpointing",
            "weight_decay",
            "warmup_steps",
            "seed",
        ):
            require_range(name, getattr(self, name), at_least=0, error=ConfigError)
        if self.critic_learning_rate is not None:
            require_range("critic_learning_rate", self.critic_learning_rate, at_least=0, error=ConfigError)
        for name in ("max_grad_norm", "eps"):
            require_range(name, getattr(self, name), above=0, error=ConfigError)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ConfigError(f"betas must both lie in [0, 1), not {self.betas}")
        self._require_schedule()

    def require_no_critic(self) -> None:
        """Accept settings that say nothing of a critic.

        Raises:
            ConfigError: one of them does.
        """
        for each in fields(self):
            chosen = getattr(self, each.name)
            if each.name in OF_THE_CRITIC and chosen != each.default:
                raise ConfigError(
                    f"{each.name} = {chosen} is about a critic, and there is none: leave it out, or give the trainer a "
                    "critic"
                )

    def _require_schedule(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ConfigError(f"schedule must be one of {', '.join(get_args(Schedule))}, not {self.schedule!r}")
        if self.schedule == "constant" and self.warmup_steps:
            raise ConfigError(
                f"schedule 'constant' has no warm-up, so warmup_steps cannot be {self.warmup_steps}: "
                "use 'constant_with_warmup'"
            )
        if self.schedule in {"linear", "cosine"} and self.total_steps is None:
            raise ConfigError(f"schedule {self.schedule!r} ends at total_steps, so total_steps must be given")
        if self.total_steps is not None and self.total_steps <= self.warmup_steps:
            raise ConfigError(
                f"total_steps must be more than warmup_steps, but {self.total_steps} <= {self.warmup_steps}"
            )

    def learning_rate_factor(self, update: int) -> float:
        """Return what the learning rates are multiplied with in an update, counted from 0.

        A function of the update's number alone, so a resumed run needs no state for it. The formulas are those of
        ``transformers.get_scheduler``; note that the first warm-up step has factor 0 there.
        """
        if update < self.warmup_steps:
            return update / self.warmup_steps
        if self.total_steps is None or self.schedule in {"constant", "constant_with_warmup"}:
            return 1.0
        progress = min(1.0, (update - self.warmup_steps) / (self.total_steps - self.warmup_steps))
        return 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
