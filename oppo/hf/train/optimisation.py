"""The optimizer of the models that are trained, and what it keeps of their weights: gradients in, steps out."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn

from oppo.errors import ConfigError
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.master_weights import MasterWeights
from oppo.hf.train.optimizer import adamw, scale_learning_rates
from oppo.hf.train.training_state import read_training, write_training
from oppo.training import TrainerSettings


class Optimisation:
    """AdamW through accelerate, on float32 copies of weights of fewer bits; each model is clipped by itself.

    Args:
        models: what is trained.
        settings: learning rates, weight decay and the norm to which gradients are scaled down.

    Attributes:
        models: as accelerate has prepared them.
        masters: the float32 copies.
        optimizer: as accelerate has prepared it.
        weights: what is optimized of each model.
    """

    def __init__(self, models: ActorCritic, settings: TrainerSettings) -> None:
        self._max_grad_norm = settings.max_grad_norm
        # Models and batches stay where the actor is; of what accelerate would choose there is one for the process.
        # A plugin goes before the environment, a number of steps would not: nothing but an update accumulates here.
        self._accelerator = Accelerator(
            device_placement=False,
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        learnt = models.trained()
        self.masters = MasterWeights(parameter for part in learnt for parameter in part)
        self.weights = [[self.masters.of(parameter) for parameter in part] for part in learnt]
        self.models, self.optimizer = self._accelerator.prepare(models, adamw(settings, self.weights))

    def scale(self, factor: float) -> None:
        """Set each learning rate to ``factor`` times its peak."""
        scale_learning_rates(self.optimizer, factor)

    def require_every_step(self) -> None:
        """Raise where accelerate, whose state is the process's, would divide losses or leave optimizer steps out.

        Raises:
            ConfigError: another ``Accelerator`` of the process accumulates gradients.
        """
        steps, made = self._accelerator.gradient_accumulation_steps, self._accelerator.sync_gradients
        if steps != 1 or not made:
            raise ConfigError(
                f"accelerate accumulates gradients over {steps} steps{'' if made else ', and makes none now'}: "
                "expected 1, and each one made. Its state is shared in a process: give every other Accelerator "
                "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1), or train in another process"
            )

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of ``loss``."""
        self._accelerator.backward(loss)
        self.masters.collect()

    def clip(self) -> tuple[float, ...]:
        """Scale the gradient of each model down to the largest norm allowed; return the norms that they had."""
        return tuple(float(self._accelerator.clip_grad_norm_(part, self._max_grad_norm)) for part in self.weights)

    def step(self) -> None:
        """Change the weights by the gradient."""
        self.optimizer.step()
        self.masters.write_back()

    def clear(self) -> None:
        """Forget the gradient."""
        self.optimizer.zero_grad()
        self.masters.clear()

    def write(self, directory: Path, counts: dict[str, int]) -> None:
        """Write what is optimized, the optimizer's moments, and counts that belong to them.

        Raises:
            OSError: it cannot be written.
        """
        write_training(directory, self._stepped_on(), self.optimizer, counts)

    def restore(self, directory: Path) -> dict[str, int]:
        """Go on with what was written; return the counts.

        Raises:
            CheckpointError: it was written of other models.
        """
        counts = read_training(directory, self._stepped_on(), self.optimizer)
        self.masters.write_back()
        return counts

    def _stepped_on(self) -> dict[str, nn.Parameter]:
        """Return what the optimizer steps on, float32 copies among it, by the names of the models' parameters."""
        named = self.models.named_parameters()
        return {name: self.masters.of(parameter) for name, parameter in named if parameter.requires_grad}
