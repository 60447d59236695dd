"""Training: settings of the optimisation, and a training step that somebody has already, as a trainer.

Both are torch-free, so that a configuration can be checked without loading torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final, Literal, Protocol, Self, TypeAlias

from annotated_types import Ge, Gt, Lt

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
    setting,
    validated,
)
from oppo.errors import ConfigError, ModelError, in_toml
from oppo.events import Batch
from oppo.models import SyncsByReference, Trained, Weights, require_model
from oppo.placement import Thread

LearningRateSchedule: TypeAlias = Literal["constant", "constant_with_warmup", "linear", "cosine"]
Aggregation: TypeAlias = Literal["tokens", "responses", "constant", "response_sums"]
"""How the losses of tokens become the loss of a minibatch; see :meth:`oppo.losses.Inputs.mean`."""
SurrogateKind: TypeAlias = Literal["clip", "dual_clip", "cispo", "sapo", "dppo_tv"]
Beta: TypeAlias = Annotated[float, Ge(0), Lt(1)]


CLIP: Final = 0.2
"""How far a ratio may move unless a clip is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surrogate:
    """How ratio and advantage of a token become its loss; see :func:`oppo.losses.surrogate_losses`.

    Attributes:
        kind: ``clip``, PPO's; ``dual_clip``, which bounds the loss of tokens with negative advantage too; ``cispo``,
            which clips a token's weight and keeps its gradient; ``sapo``, a smooth gate in place of the clip;
            ``dppo_tv``, which masks tokens by how far their probability moved.
        clip, clip_high: how far the ratio may fall below 1, and rise above it (absent: as ``clip``); of ``dppo_tv`` how
            far the probability may fall and rise.
        dual_clip: of ``dual_clip``: the largest ratio that counts against a token; 3 unless given.
        gates: of ``sapo``: the steepness of the gate of tokens with positive and with negative advantage; 1 and 1.05
            unless given.

    Raises:
        ConfigError: a value is out of range, or this kind does not read it.
    """

    kind: SurrogateKind = "clip"
    clip: float | None = None
    clip_high: float | None = None
    dual_clip: float | None = None
    gates: tuple[float, float] | None = None

    def __post_init__(self) -> None:
        reads = {"dual_clip": self.kind == "dual_clip", "gates": self.kind == "sapo"}
        reads |= dict.fromkeys(("clip", "clip_high"), self.kind != "sapo")
        if idle := [name for name, read in reads.items() if getattr(self, name) is not None and not read]:
            raise ConfigError(f"surrogate = {self.kind!r} does not read {' and '.join(idle)}: leave it out")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ConfigError(f"dual_clip bounds ratios above 1: expected a number above 1, got {self.dual_clip}")
        if self.gates is not None and min(self.gates) <= 0:
            raise ConfigError(f"gates have a steepness above 0, got {self.gates}")

    @classmethod
    def of(cls, settings: Any) -> Self:
        """Return the surrogate of a dataclass with fields of these names, ``surrogate`` for the kind."""
        kind, names = settings.surrogate, ("clip", "clip_high", "dual_clip", "gates")
        given = changed(settings, names) if kind == "sapo" else {name: getattr(settings, name) for name in names}
        return cls(kind=kind, **given)

    @property
    def band(self) -> tuple[float, float]:
        """How far a ratio may fall below 1, and rise above it."""
        low = CLIP if self.clip is None else self.clip
        return low, low if self.clip_high is None else self.clip_high


OF_THE_CRITIC = frozenset({"critic_learning_rate", "critic_warmup"})
"""The settings that need a critic."""


@dataclass(frozen=True, slots=True, kw_only=True)
@validated(ConfigError)
class TrainerSettings:
    """Settings of the optimisers of actor and critic; the defaults are TRL 1.12's, with four exceptions.

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

    optimizer: Literal["adamw", "muon"] = setting(
        "adamw",
        "`adamw`; or `muon` for the matrices of layers, with updates as large as AdamW's and half of its memory, and "
        "AdamW for embeddings, heads, vectors, adapters and experts in one tensor",
    )
    learning_rate: LearningRate = setting(3e-6, "of the optimizer, for the actor")
    critic_learning_rate: LearningRate | None = setting(
        None, "of the optimizer, for the critic; absent, or on a shared trunk: the actor's"
    )
    critic_warmup: Count = setting(
        0, "updates at the beginning that train the critic only (on a shared trunk: its head)"
    )
    epochs: PositiveCount = setting(4, "passes over each batch")
    minibatches: PositiveCount = setting(1, "optimizer steps in each pass")
    max_grad_norm: Limit = setting(1.0, "each model's gradient is scaled down to this norm")
    weight_decay: NonNegative = setting(0.0, "of the optimizer, for matrices only")
    router_aux_loss: NonNegative | None = setting(
        None,
        "weight of the load-balancing loss of a mixture of experts, of each minibatch as a whole, which costs one more "
        "forward pass; 0: none; absent: `router_aux_loss_coef` of a model whose config sets `output_router_logits`",
    )
    router_replay: bool = setting(
        False,
        "a mixture of experts is trained with the experts that its routers chose while it decoded (R3), their gate "
        "weights recomputed; costs memory for the choices of each token and layer",
    )
    betas: Annotated[tuple[Beta, Beta], FromList()] = setting((0.9, 0.999), "of AdamW")
    eps: Positive = setting(1e-5, "of AdamW")
    schedule: LearningRateSchedule = setting("constant", "a transformers scheduler, such as constant, linear or cosine")
    warmup_steps: Count | Annotated[float, Gt(0), Lt(1)] = setting(
        0, "updates over which the learning rate grows from 0, or, below 1, their share of the run; not with `constant`"
    )
    total_steps: PositiveCount | None = setting(
        None, "updates in the run; `linear` and `cosine` reach 0 there and need it"
    )
    gradient_checkpointing: Count = setting(
        0, "recompute every n-th layer in the backward pass, to save memory: 1 is all layers, 0 none", resume="rounding"
    )
    micro_batch_tokens: PositiveCount | None = setting(
        None,
        "most tokens, padding included, in a forward pass; a longer row gets a pass of its own. Unless given, 2,048 on "
        "a CPU; on a GPU 4,096 to 32,768, of a small model 131,072, as its memory allows, or 16,384 in a program",
        resume="rounding",
    )
    seed: Seed = setting(0, "keys, with the number of the update, how rows are shuffled into minibatches")

    def __post_init__(self) -> None:
        if self.schedule == "constant" and self.warmup_steps:
            raise ConfigError(
                f"schedule 'constant' has no warm-up, so warmup_steps cannot be {self.warmup_steps}: leave it out, or "
                "use 'constant_with_warmup'"
            )
        if self.schedule in {"linear", "cosine"} and self.total_steps is None:
            raise ConfigError(f"schedule {self.schedule!r} ends at total_steps, so total_steps must be given")
        if 0 < self.warmup_steps < 1 and self.total_steps is None:
            raise ConfigError(f"warmup_steps = {self.warmup_steps} is a share of total_steps, which must be given")
        if self.total_steps is not None and self.total_steps <= self.warm_up:
            raise ConfigError(
                f"warmup_steps must be fewer than the steps of the run ({self.total_steps}), not {self.warmup_steps}"
            )

    @property
    def warm_up(self) -> int:
        if self.warmup_steps >= 1 or not self.total_steps:
            return int(self.warmup_steps)
        return min(math.ceil(self.warmup_steps * self.total_steps), self.total_steps - 1)

    def require_no_critic(self) -> None:
        """Require the defaults for the settings that need a critic."""
        for name, value in changed(self, OF_THE_CRITIC).items():
            raise ConfigError(
                f"{name} = {in_toml(value)} is about a critic, and there is none: leave it out, or give the trainer a "
                "critic"
            )

    def learning_rate_factor(self, update: int) -> float:
        """Return the factor of the learning rates in an update, counted from 0.

        It depends on the update's number alone, so a resumed run needs no state for it. The formulas are those of
        ``transformers.get_scheduler``, in which the first warm-up step has factor 0.
        """
        if update < self.warm_up:
            return update / self.warm_up
        if self.total_steps is None or self.schedule in {"constant", "constant_with_warmup"}:
            return 1.0
        progress = min(1.0, (update - self.warm_up) / (self.total_steps - self.warm_up))
        return 1.0 - progress if self.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))


TrainStep: TypeAlias = Callable[[Batch], Mapping[str, float] | None]
"""Trains on a batch, in place; returns metrics by name, or nothing."""


class Module(Protocol):
    """An object with weights: a ``torch.nn.Module``, for example."""

    def state_dict(self) -> Mapping[str, object]:
        """Return the tensors by name; they lie in the module's own memory."""


class FunctionTrainer(SyncsByReference):
    """A training step as a :class:`oppo.models.Trainer`.

    Optimizer and schedule stay the function's own; so do checkpoints of them.

    Args:
        step: trains on a batch, in place, and returns metrics or nothing.
        actor: the module that it trains, which the policy serves, or has a copy of.
        critic: the value model that it trains; ``None`` without one.
        place: where the function is called; ``None``: on the event loop, where everything else waits for it.

    Attributes:
        version: the number of updates made so far.

    Example:
        >>> class Nothing:
        ...     def state_dict(self):
        ...         return {}
        >>> FunctionTrainer(lambda batch: {"loss/policy_avg": 0.0}, Nothing()).version
        0
    """

    def __init__(
        self, step: TrainStep, actor: Module, critic: Module | None = None, *, place: Thread | None = None
    ) -> None:
        require_model(step, "TrainStep", ("__call__",))
        for module in (actor, critic) if critic is not None else (actor,):
            require_model(module, "Module", ("state_dict",))
        self.version = 0
        self._step = step
        self._actor = actor
        self._critic = critic
        self._place = place

    async def update(self, batch: Batch) -> Trained:
        """Train on one batch; one without a rollout is passed over.

        Raises:
            ModelError: the function returned something else than metrics.
            Exception: whatever it raised.
        """
        metrics: Mapping[str, float] | None = {}
        if len(batch):
            metrics = self._step(batch) if self._place is None else await self._trained(self._place, batch)
        self.version += 1
        try:
            return Trained({name: float(value) for name, value in dict(metrics or {}).items()})
        except (TypeError, ValueError) as error:
            raise ModelError(
                f"a training step returns metrics, a mapping from names to numbers, or nothing; got {metrics!r:.200}"
            ) from error

    async def _trained(self, place: Thread, batch: Batch) -> Mapping[str, float] | None:
        return await place.call("update", self._step, batch)

    def weights(self) -> Weights:
        critic = {} if self._critic is None else self._critic.state_dict()
        return Weights(self.version, self._actor.state_dict(), critic)
