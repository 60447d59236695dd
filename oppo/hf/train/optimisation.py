"""The optimizer of the models that are trained, and the float32 weights on which it steps: gradients in, steps out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from oppo.errors import ConfigError
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.master_weights import MasterWeights
from oppo.training import TrainerSettings


class Optimisation:
    """AdamW through accelerate, on float32 copies of 16-bit weights; it clips each model's gradient apart.

    Args:
        models: what is trained.
        settings: learning rates, weight decay and the largest gradient norm.

    Attributes:
        models: as accelerate has prepared them.
        masters: the float32 copies.
        optimizer: as accelerate has prepared it.
        weights: on which it steps, for each model.
    """

    def __init__(self, models: ActorCritic, settings: TrainerSettings) -> None:
        self._max_grad_norm = settings.max_grad_norm
        # Models and batches stay on the actor's device; accelerate would choose one for the whole process.
        # Only a plugin takes precedence over the environment, and nothing but an update accumulates gradients here.
        self._accelerator = Accelerator(
            device_placement=False,
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        trained = models.trained()
        self.masters = MasterWeights(parameter for part in trained for parameter in part)
        self.weights = [[self.masters.of(parameter) for parameter in part] for part in trained]
        self._held: dict[nn.Parameter, Tensor] = {}
        self.models, self.optimizer = self._accelerator.prepare(models, _adamw(settings, self.weights))

    def scale(self, factor: float) -> None:
        """Set each learning rate to ``factor`` times its peak."""
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak"] * factor

    def require_every_step(self) -> None:
        """Accept accelerate's state, which is the process's, only if it neither divides losses nor skips steps.

        Raises:
            ConfigError: another ``Accelerator`` of the process accumulates gradients.
        """
        steps, synchronised = self._accelerator.gradient_accumulation_steps, self._accelerator.sync_gradients
        if steps != 1 or not synchronised:
            raise ConfigError(
                f"accelerate accumulates gradients over {steps} steps{'' if synchronised else ', and makes none now'}: "
                "expected 1, and each one made. Its state is shared in a process: give every other Accelerator "
                "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1), or train in another process"
            )

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``."""
        self._accelerator.backward(loss)
        self.masters.collect()

    def is_finite(self) -> bool:
        """Return whether all gradients are."""
        finite = [_local(grad).isfinite().all() for grad in self._gradients().values()]
        return not finite or bool(torch.stack(finite).all())  # one answer of the device, not one for each gradient

    def hold(self) -> None:
        """Add the gradients to those held aside, and clear them."""
        for weight, grad in self._gradients().items():
            held = self._held.get(weight)
            self._held[weight] = grad if held is None else held.add_(grad)
            weight.grad = None

    def release(self, factor: float) -> None:
        """Make ``factor`` times the gradients held aside the gradients."""
        for weight, grad in self._held.items():
            weight.grad = grad.mul_(factor)
        self.forget()

    def forget(self) -> None:
        """Drop the gradients held aside."""
        self._held = {}

    def _gradients(self) -> dict[nn.Parameter, Tensor]:
        return {weight: weight.grad for part in self.weights for weight in part if weight.grad is not None}

    def clip(self) -> tuple[float, ...]:
        """Scale each model's gradient down to the largest norm allowed; return the norms before."""
        return tuple(float(self._accelerator.clip_grad_norm_(part, self._max_grad_norm)) for part in self.weights)

    def step(self) -> None:
        """Make an optimizer step."""
        self.optimizer.step()
        self.masters.write_back()

    def clear(self) -> None:
        """Clear the gradients."""
        self.optimizer.zero_grad()
        self.masters.clear()

    def named_weights(self) -> dict[str, nn.Parameter]:
        """Return the weights on which it steps, by the names of the models' parameters."""
        named = self.models.named_parameters()
        return {name: self.masters.of(parameter) for name, parameter in named if parameter.requires_grad}


def _local(tensor: Tensor) -> Tensor:
    local: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local


def _adamw(settings: TrainerSettings, weights: Sequence[Sequence[nn.Parameter]]) -> torch.optim.AdamW:
    """Return the optimizer of the actor's weights and the critic's, if any; only matrices decay."""
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
