"""Training transformers models, through accelerate, on a loss of which nothing else is known here.

One update::

    batch ── epochs x minibatches ──> units ── by length, within a token budget ─> micro-batches
                  │                                                                   │ forward, loss, backward
                  └── clip, optimizer step (or none, where something is not finite) <─┘

A loss divides by the size of a whole minibatch, and its units (a token, a row, the rows of a group) are never split, so
how a minibatch is cut into micro-batches does not change its gradient. Dropout is off for the models' whole life: they
may be serving rollouts at any time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import ParamSpec, TypeVar

import anyio
import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin
from torch import Tensor, nn
from transformers import PreTrainedModel

from oppo.durable import writing
from oppo.errors import ConfigError
from oppo.events import Batch
from oppo.hf.actor_critic import ActorCritic, require_value_head, trained
from oppo.hf.drift import Drift
from oppo.hf.load import quiet
from oppo.hf.lora import merged
from oppo.hf.master import MasterWeights
from oppo.hf.optimizer import adamw, scale_learning_rates
from oppo.hf.packing import MicroBatch, micro_batches, minibatches, pack, units
from oppo.hf.precision import require_trainable
from oppo.hf.recompute import recompute
from oppo.hf.tally import Tally
from oppo.hf.training_state import read_training, write_training
from oppo.losses import Evaluated, Input, Inputs, Loss, Whole, default_loss, entropies, token_logprobs
from oppo.losses.protocol import require_inputs, require_loss
from oppo.models import Follower, Sampling, Trained, Weights
from oppo.placement import Thread
from oppo.training import TrainerSettings

__all__ = ["HfTrainer", "TrainerSettings"]

P = ParamSpec("P")
R = TypeVar("R")


class HfTrainer:
    """Trains a causal language model, and its critic if it has one; implements :class:`oppo.models.Trainer`.

    The metrics are those of the loss, how far stale tokens had drifted, and the work done.

    Weights of fewer bits than float32 are trained through float32 copies, see :mod:`oppo.hf.master`.

    Where the two models share their trunk (:func:`oppo.hf.trunk.value_model_on`) it is read once, and gets the gradient
    of the sum of all losses. It counts as the actor's: it has the actor's learning rate, its gradient is clipped with
    the actor's, and while the critic is warmed up it rests, so that only the value head learns then.

    Args:
        actor: a causal language model; the parameters that require a gradient are trained.
        critic: a sequence-classification model with one label: its head's output at the position before a response
            token is the value of the state in which that token was chosen. ``None``: advantages need none (GRPO, RLOO),
            and nothing of a value loss is computed, reported or saved.
        sampling: how the policy draws tokens: its temperature divides the logits here too. (What it left out comes with
            the tokens, as their support.)
        thread: where updates run.
        settings: everything about the optimisation.
        loss: what is minimised; unless given, PPO's: :class:`oppo.losses.PPOLoss` where there is a critic, else
            :class:`oppo.losses.ClippedLoss`.

    Attributes:
        micro_batches: how many have been read and taken back; it grows while an update goes on.

    Raises:
        ConfigError: there is no critic, but settings or a loss that are about one; or one, and no loss for it.
        ModelRefused: the critic has no single-label ``score`` head, a model has nothing to train or to recompute or is
            in float16.
    """

    def __init__(
        self,
        actor: PreTrainedModel,
        critic: PreTrainedModel | None = None,
        *,
        sampling: Sampling,
        thread: Thread,
        settings: TrainerSettings | None = None,
        loss: Loss | None = None,
    ) -> None:
        self.settings = settings or TrainerSettings()
        self.loss = default_loss(critic=critic is not None) if loss is None else loss
        require_loss(self.loss, critic=critic is not None)
        self._asked = self.loss.reads | self.loss.measures
        if critic is None:
            self.settings.require_no_critic()
        else:
            require_value_head(critic)
        models = [actor] if critic is None else [actor, critic]
        for model in models:
            require_trainable(model)
        self._sampling = sampling
        self._thread = thread
        # Models and batches stay where the actor is; of what accelerate would choose there is one for the process.
        # A plugin goes before the environment, a number of steps would not: nothing but an update accumulates here.
        self._accelerator = Accelerator(
            device_placement=False,
            mixed_precision="no",
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1),
        )
        for model in models:
            model.train(mode=False)
            if self.settings.gradient_checkpointing:
                recompute(model, self.settings.gradient_checkpointing)
        self._actor, self._critic = actor, critic
        learnt = [trained(actor, "actor")] + ([] if critic is None else [trained(critic, "critic", but=actor)])
        self._masters = MasterWeights(parameter for part in learnt for parameter in part)
        self._weights = [[self._masters.of(parameter) for parameter in part] for part in learnt]
        self._models, self._optimizer = self._accelerator.prepare(
            ActorCritic(actor, critic), adamw(self.settings, self._weights)
        )
        self._version = 0
        self._restored = 0
        self._episodes = 0
        self.micro_batches = 0

    @property
    def version(self) -> int:
        """The number of updates made so far."""
        return self._version

    @property
    def has_learned(self) -> bool:
        """Whether an update was made since the trainer was made, or restored."""
        return self._version > self._restored

    async def update(self, batch: Batch) -> Trained:
        """Train on one batch; the version then is one more, even if every minibatch was skipped.

        A minibatch whose loss or gradient is not finite changes nothing but the report: its rollouts are in
        ``skipped``, each once, and in ``nonfinite`` where no other minibatch trained them.

        Raises:
            ConfigError: the loss reads log-probs that the batch does not have, or another ``Accelerator`` of the
                process accumulates gradients.
        """
        require_inputs(self.loss, batch)
        return await self._thread.call("update", self._update, batch)

    async def publish(self, *followers: Follower) -> None:
        """Give the current weights to each follower, by reference and one after the other; never half cancelled.

        There is no way back from a failure: the old weights no longer exist, and a follower may share the storage of
        the new ones. So a failure says which followers have which version, and ends the run; a checkpoint is the way
        on.
        """
        critic = {} if self._critic is None else self._critic.state_dict()
        weights = Weights(self._version, actor=self._actor.state_dict(), critic=critic)
        with anyio.CancelScope(shield=True):
            for follower in followers:
                try:
                    await follower.load(weights)
                except Exception as error:
                    held = ", ".join(f"{type(one).__name__} has version {one.version}" for one in followers)
                    error.add_note(f"while publishing version {self._version}: {held}; do not go on from here")
                    raise
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def save(self, directory: Path) -> None:
        """Write what is trained, loadable by ``from_pretrained``, as ``directory/actor`` and ``directory/critic``."""
        await self._thread.call("save", self.write_models, directory)

    def write(self, directory: Path) -> None:
        """Write all that :meth:`restore` needs, and what is trained; to be called in the trainer's thread."""
        counts = {"version": self._version, "episodes": self._episodes}
        write_training(directory, self._stepped_on(), self._optimizer, counts)
        self.write_models(directory)

    def write_models(self, directory: Path) -> None:
        """Write what :meth:`save` does; to be called in the trainer's thread."""
        with quiet(), writing(directory / "actor"):
            self._actor.save_pretrained(directory / "actor")
        if self._critic is not None:
            with quiet(), writing(directory / "critic"):
                self._critic.save_pretrained(directory / "critic", state_dict=merged(self._critic))

    async def restore(self, directory: Path) -> None:
        """Go on where the trainer that wrote ``directory`` was; followers know when :meth:`publish` tells them.

        Raises:
            CheckpointError: it was written of other models.
        """
        counts = await self.call("restore", self._restore, directory)
        self._version = self._restored = counts["version"]
        self._episodes = counts["episodes"]

    async def call(self, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``work`` between two updates, in the trainer's thread."""
        return await self._thread.call(label, work, *args, **kwargs)

    def _restore(self, directory: Path) -> dict[str, int]:
        counts = read_training(directory, self._stepped_on(), self._optimizer)
        self._masters.write_back()
        return counts

    def _stepped_on(self) -> dict[str, nn.Parameter]:
        """Return what the optimizer steps on, float32 copies among it, by the names of the models' parameters."""
        named = self._models.named_parameters()
        return {name: self._masters.of(parameter) for name, parameter in named if parameter.requires_grad}

    def _update(self, batch: Batch) -> Trained:
        factor = self.settings.learning_rate_factor(self._version)
        scale_learning_rates(self._optimizer, factor)
        counts = self._counts(batch) | {"lr": self.settings.learning_rate * factor}
        tally = Tally(self.loss, Drift(self._version))
        try:
            for whole in self._minibatches(batch):
                self._step(batch, whole, tally)
        finally:  # what a failed update has accumulated must not reach the next one
            self._clear_gradients()
        self._version += 1
        self._episodes += len(batch)
        skipped = tuple(rollout for rollout in batch.rollouts if rollout in tally.skipped)
        return Trained(
            metrics=tally.metrics() | counts | {"episode": float(self._episodes)},
            nonfinite=tuple(rollout for rollout in skipped if rollout not in tally.stepped),
            skipped=skipped,
        )

    def _minibatches(self, batch: Batch) -> Iterator[list[list[int]]]:
        whole = units(batch, self.loss.unit)
        for epoch in range(self.settings.epochs):
            yield from minibatches(whole, self.settings.minibatches, (self.settings.seed, self._version, epoch))

    def _require_every_step(self) -> None:
        """Raise where accelerate, whose state is the process's, would divide losses or leave optimizer steps out."""
        steps, made = self._accelerator.gradient_accumulation_steps, self._accelerator.sync_gradients
        if steps != 1 or not made:
            raise ConfigError(
                f"accelerate accumulates gradients over {steps} steps{'' if made else ', and makes none now'}: "
                "expected 1, and each one made. Its state is shared in a process: give every other Accelerator "
                "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=1), or train in another process"
            )

    def _step(self, batch: Batch, whole: list[list[int]], tally: Tally) -> None:
        self._require_every_step()
        rows = list(chain.from_iterable(whole))
        size, device = Whole.of(batch, rows), self._actor.device
        parts: list[Tensor] = []
        names: tuple[str, ...] = ()
        for group in micro_batches(batch, whole, device, self.settings.micro_batch_tokens):
            part = pack(batch, group, device, self._asked)
            evaluated = self._backward(part, size, tally.drift)
            names = tuple(evaluated.measured)
            parts.append(torch.stack((*evaluated.measured.values(), evaluated.loss)).detach())
            tally.read(part)
            self.micro_batches += 1
        tally.drift.opening = False
        *measured, loss = torch.stack(parts).sum(0).tolist()
        norms = tuple(self._clip(part) for part in self._weights)
        rollouts = {batch.responses[r].prompt.rollout for r in rows}
        if np.isfinite((loss, *norms)).all():
            self._optimizer.step()
            self._masters.write_back()
            tally.measured.append(dict(zip(names, measured, strict=True)))
            tally.norms.append(norms)
            tally.stepped |= rollouts
        else:
            tally.minibatches_skipped += 1
            tally.skipped |= rollouts
        self._clear_gradients()

    def _backward(self, part: MicroBatch, size: Whole, drift: Drift) -> Evaluated:
        """Add the gradient of a part of a minibatch; return what the loss says of it."""
        said = self._said(part)
        given = {name: tensor if name in self.loss.reads else tensor.detach() for name, tensor in said.items()}
        evaluated = self.loss(Inputs(part.mask, part.row, part.groups, size, {**part.given, **given}))
        drift.add(part, said["logprobs"], evaluated)
        self._accelerator.backward(evaluated.loss)
        self._masters.collect()
        return evaluated

    def _said(self, part: MicroBatch) -> dict[Input, Tensor]:
        """Return what the models say of each token, as far as it is asked for: float32 [T]; log-probs in any case."""
        logits, values = self._models(part, actor_learns=self._version >= self.settings.critic_warmup)
        temperature = self._sampling.temperature
        said: dict[Input, Tensor] = {"logprobs": token_logprobs(logits, part.tokens, temperature, part.support)}
        if "entropies" in self._asked:
            spread = logits if "entropies" in self.loss.reads else logits.detach()
            said["entropies"] = entropies(spread, temperature, part.support)
        return said if values is None else {**said, "values": values}

    def _clip(self, weights: list[nn.Parameter]) -> float:
        return float(self._accelerator.clip_grad_norm_(weights, self.settings.max_grad_norm))

    def _clear_gradients(self) -> None:
        self._optimizer.zero_grad()
        self._masters.clear()

    def _counts(self, batch: Batch) -> dict[str, float]:
        end = self._sampling.stop[:1]
        return {
            "val/num_eos_tokens": float(np.isin(batch.tokens, end).sum()),
            "train/tokens": float(batch.sampled.sum()),
        }
