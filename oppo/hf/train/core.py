"""The trainer where its models live: synchronous, and for any loss.

One update::

    batch ── epochs x minibatches ──> units ── by length, within a token budget ─> micro-batches
                  │                                                                   │ forward, loss, backward
                  └── clip, optimizer step (none if loss or gradient is not finite) <─┘

A loss divides by the size of a whole minibatch, and its units (a token, a row, the rows of a group) are never split, so
the gradient of a minibatch does not depend on its micro-batches. Dropout is off for the models' whole life: they may be
serving rollouts at any time.
"""

from __future__ import annotations

from functools import cached_property, partial
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oppo.durable import writing
from oppo.events import Batch
from oppo.hf.loading.models import quiet
from oppo.hf.lora import has_adapters, merged
from oppo.hf.shared_memory import SharedModel
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.optimisation import Optimisation
from oppo.hf.train.packing import MicroBatch, micro_batches, minibatches, pack, units
from oppo.hf.train.recompute import recompute
from oppo.hf.train.training_state import read_training, write_training
from oppo.hf.train.update_metrics import StalenessMetrics, UpdateMetrics
from oppo.hosted_trainer import TrainerCounts
from oppo.losses import Evaluated, Input, Inputs, Loss, Whole, entropies, token_logprobs
from oppo.losses.protocol import require_inputs, require_loss
from oppo.models import Sampling, Trained, Weights
from oppo.training import TrainerSettings


class HfTrainerCore:
    """Trains an actor, and its critic if it has one; implements :class:`oppo.hosted_trainer.TrainerCore`.

    Pickled, it crosses to another process with a new optimizer, over the same weights and counts.

    Args:
        models: what is trained.
        sampling, settings, loss: see :class:`oppo.hf.HfTrainer`.
        counts: of updates and their work.

    Raises:
        ConfigError, ModelRefused: as :class:`oppo.hf.HfTrainer` does.
    """

    def __init__(
        self, models: ActorCritic, sampling: Sampling, settings: TrainerSettings, loss: Loss, counts: TrainerCounts
    ) -> None:
        self.actor, self.critic = models.actor, models.critic
        self.settings, self.loss, self.counts = settings, loss, counts
        require_loss(loss, critic=self.critic is not None)
        if self.critic is None:
            settings.require_no_critic()
        models.trained()
        for model in filter(None, (self.actor, self.critic)):
            model.train(mode=False)
            if settings.gradient_checkpointing:
                recompute(model, settings.gradient_checkpointing)
        self._models = models
        self._sampling = sampling
        self._inputs = loss.reads | loss.measures

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (SharedModel(self._models), self._sampling, self.settings, self.loss, self.counts)

    @cached_property
    def optimisation(self) -> Optimisation:
        """The optimizer; created at its first use, so that its memory is allocated where updates are made."""
        return Optimisation(self._models, self.settings)

    def weights(self) -> Weights:
        """Return the current weights, by reference."""
        critic = {} if self.critic is None else self.critic.state_dict()
        merge = partial(merged, self.actor) if has_adapters(self.actor) else None
        return Weights(self.counts.version, actor=self.actor.state_dict(), critic=critic, merge=merge)

    def write(self, directory: Path) -> None:
        """Write all that :meth:`restore` needs, and the trained models.

        Raises:
            OSError: it cannot be written.
        """
        counts = {"version": self.counts.version, "episodes": self.counts.episodes}
        write_training(directory, self.optimisation, counts)
        self.save(directory)

    def save(self, directory: Path) -> None:
        """Write the trained models, loadable by ``from_pretrained``, as ``directory/actor`` and ``directory/critic``.

        Raises:
            OSError: it cannot be written.
        """
        with quiet(), writing(directory / "actor"):
            self.actor.save_pretrained(directory / "actor")
        if self.critic is not None:
            with quiet(), writing(directory / "critic"):
                self.critic.save_pretrained(directory / "critic", state_dict=merged(self.critic))

    def restore(self, directory: Path) -> None:
        """Continue where the trainer that wrote ``directory`` was.

        Raises:
            CheckpointError: it was written of other models.
        """
        counts = read_training(directory, self.optimisation)
        self.counts.version = self.counts.restored = counts["version"]
        self.counts.episodes = counts["episodes"]

    def update(self, batch: Batch) -> Trained:
        """Train on one batch; the version increases by one, even if every minibatch was skipped.

        A minibatch whose loss or gradient is not finite makes no optimizer step: its rollouts are in ``skipped``, each
        once, and in ``nonfinite`` if no other minibatch trained them.

        Raises:
            ConfigError: the loss reads log-probs that the batch lacks, or another ``Accelerator`` of the process
                accumulates gradients.
        """
        require_inputs(self.loss, batch)
        factor = self.settings.learning_rate_factor(self.counts.version)
        self.optimisation.scale(factor)
        update = UpdateMetrics(self.loss, StalenessMetrics(self.counts.version))
        rows = units(batch, self.loss.unit)
        try:
            for epoch in range(self.settings.epochs):
                key = self.settings.seed, self.counts.version, epoch
                for minibatch in minibatches(rows, self.settings.minibatches, key):
                    self._step(batch, minibatch, update)
        finally:  # gradients of a failed update must not reach the next one
            self.optimisation.clear()
        self.counts.episodes += len(batch)
        self.counts.version += 1
        skipped = tuple(rollout for rollout in batch.rollouts if rollout in update.skipped)
        return Trained(
            metrics={
                **update.metrics(),
                "val/num_eos_tokens": float(np.isin(batch.tokens, self._sampling.stop[:1]).sum()),
                "train/tokens": float(batch.sampled.sum()),
                "lr": self.settings.learning_rate * factor,
                "episode": float(self.counts.episodes),
            },
            nonfinite=tuple(rollout for rollout in skipped if rollout not in update.stepped),
            skipped=skipped,
        )

    def _step(self, batch: Batch, minibatch: list[list[int]], update: UpdateMetrics) -> None:
        self.optimisation.require_every_step()
        rows = list(chain.from_iterable(minibatch))
        size, device = Whole.of(batch, rows), self.actor.device
        parts: list[Tensor] = []
        for group in micro_batches(batch, minibatch, device, self.settings.micro_batch_tokens):
            part = pack(batch, group, device, self._inputs)
            evaluated = self._backward(part, size, update.staleness)
            parts.append(torch.stack((*evaluated.measured.values(), evaluated.loss)).detach())
            update.count(part)
            self.counts.micro_batches += 1
        update.staleness.first_minibatch = False
        *measured, loss = torch.stack(parts).sum(0).tolist()
        norms = self.optimisation.clip()
        rollouts = {batch.responses[r].prompt.rollout for r in rows}
        if np.isfinite((loss, *norms)).all():
            self.optimisation.step()
            update.measured.append(dict(zip(evaluated.measured, measured, strict=True)))
            update.norms.append(norms)
            update.stepped |= rollouts
        else:
            update.minibatches_skipped += 1
            update.skipped |= rollouts
        self.optimisation.clear()

    def _backward(self, part: MicroBatch, size: Whole, staleness: StalenessMetrics) -> Evaluated:
        """Add the gradient of a micro-batch of a minibatch of this size; return the loss's result."""
        outputs = self._outputs(part)
        inputs = {name: tensor if name in self.loss.reads else tensor.detach() for name, tensor in outputs.items()}
        evaluated = self.loss(Inputs(part.mask, part.row, part.groups, size, {**part.given, **inputs}))
        staleness.add(part, outputs["logprobs"], evaluated)
        self.optimisation.backward(evaluated.loss)
        return evaluated

    def _outputs(self, part: MicroBatch) -> dict[Input, Tensor]:
        """Return log-probs, values if there is a critic, and entropies if the loss has them as input: float32 [T]."""
        logits, values = self.optimisation.models(part, actor_learns=self.counts.version >= self.settings.critic_warmup)
        temperature = self._sampling.temperature
        outputs: dict[Input, Tensor] = {"logprobs": token_logprobs(logits, part.tokens, temperature, part.support)}
        if "entropies" in self._inputs:
            source = logits if "entropies" in self.loss.reads else logits.detach()
            outputs["entropies"] = entropies(source, temperature, part.support)
        return outputs if values is None else {**outputs, "values": values}
