"""The trainer where its models live: synchronous, and for any loss.

One update::

    batch ── epochs x minibatches ──> units ── by length, within a token budget ─> micro-batches
                  │                                                                   │ forward, loss, backward
                  └── clip, optimizer step (none if loss or gradient is not finite) <─┘

A loss divides by the size of a whole minibatch, and its units (a token, a row, the rows of a group) are never split, so
the gradient of a minibatch does not depend on its micro-batches, nor on which rank computes which of them: gradients
and measurements are summed over the ranks, and all of them make the same optimizer step. Dropout is off for the models'
whole life: they may be serving rollouts at any time.
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
from oppo.hf.train.packing import MicroBatch, micro_batches, minibatches, pack, tokens_read, units
from oppo.hf.train.recompute import recompute
from oppo.hf.train.sharding import reset, shard, whole
from oppo.hf.train.team import Alone, Ranked, Team
from oppo.hf.train.training_state import gather_training, read_training, write_training
from oppo.hf.train.update_metrics import StalenessMetrics, UpdateMetrics
from oppo.hosted_trainer import TrainerCounts
from oppo.losses import Evaluated, Input, Inputs, Loss, Whole, entropies, token_logprobs
from oppo.losses.protocol import require_inputs, require_loss
from oppo.models import Sampling, Trained, Weights
from oppo.training import TrainerSettings


class HfTrainerCore:
    """Trains an actor, and its critic if it has one; implements :class:`oppo.hosted_trainer.TrainerCore`.

    Pickled, it crosses to another process with a new optimizer, over the same weights and counts. Several processes
    that :meth:`join` train together: the first keeps the weights and counts that the others have copies or shards of.

    Args:
        models: what is trained.
        sampling, settings, loss, shard: see :class:`oppo.hf.HfTrainer`.
        counts: of updates and their work.

    Raises:
        ConfigError, ModelRefused: as :class:`oppo.hf.HfTrainer` does.
    """

    def __init__(
        self,
        models: ActorCritic,
        sampling: Sampling,
        settings: TrainerSettings,
        loss: Loss,
        counts: TrainerCounts,
        *,
        shard: bool = True,
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
        self._whole = self._models = models
        self._sampling = sampling
        self._inputs = loss.reads | loss.measures
        self._shard = shard
        self._team: Team = Alone()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        made = partial(type(self), shard=self._shard)
        return made, (SharedModel(self._whole), self._sampling, self.settings, self.loss, self.counts)

    def join(self, rank: int, size: int, meeting: str) -> None:
        """Train with the copies of this core in other processes; see :class:`oppo.placement.Member`.

        Raises:
            ModelRefused: a model cannot be sharded.
        """
        team = Ranked(rank, size, meeting, self.actor.device)
        if rank:
            self.counts = self.counts.copy()
        if rank or self._shard:
            self._models = self._whole.with_own_weights()
        if self._shard:
            shard(self._models, team.mesh)
        self._team = team

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
        tensors = gather_training(self.optimisation)
        self._team.once(lambda: write_training(directory, tensors, counts))
        self.save(directory)

    def save(self, directory: Path) -> None:
        """Write the trained models, loadable by ``from_pretrained``, as ``directory/actor`` and ``directory/critic``.

        Raises:
            OSError: it cannot be written.
        """
        self._team.once(partial(self._save, directory))

    def _save(self, directory: Path) -> None:
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
        self._keep_whole()
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
            update.sum_over(self._team)
            self._keep_whole()
        except BaseException:
            reset(self._models)
            raise
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
        size = Whole.of(batch, rows, self._sampling.max_new_tokens)
        names, sums = self._gradient(batch, minibatch, size, update)
        *measured, loss = sums.tolist()
        norms = self.optimisation.clip()
        rollouts = {batch.responses[r].prompt.rollout for r in rows}
        if np.isfinite((loss, *norms)).all():
            self.optimisation.step()
            update.measured.append(dict(zip(names, measured, strict=True)))
            update.norms.append(norms)
            update.stepped |= rollouts
        else:
            update.minibatches_skipped += 1
            update.skipped |= rollouts
        self.optimisation.clear()

    def _gradient(
        self, batch: Batch, minibatch: list[list[int]], size: Whole, update: UpdateMetrics
    ) -> tuple[tuple[str, ...], Tensor]:
        """Add the gradient of a minibatch; return the names of what its loss measures, and their sums and the loss."""
        device, budget = self._models.actor.device, self.settings.micro_batch_tokens
        groups = list(micro_batches(batch, minibatch, device, budget))
        names, parts = tuple[str, ...](), list[Tensor]()
        for mine in self._team.share([tokens_read(batch, group) for group in groups]):
            if mine is None:
                self._idle(batch, groups[-1][:1])
                continue
            part = pack(batch, groups[mine], device, self._inputs)
            evaluated = self._backward(part, size, update.staleness)
            names = tuple(evaluated.measured)
            parts.append(torch.stack((*evaluated.measured.values(), evaluated.loss)).detach())
            update.count(part)
            self.counts.micro_batches += 1
        update.staleness.first_minibatch = False
        names = self._team.agreed(names)
        self._team.sum_gradients(chain.from_iterable(self.optimisation.weights))
        return names, self._team.sum(torch.stack(parts).sum(0) if parts else torch.zeros(len(names) + 1))

    def _idle(self, batch: Batch, rows: list[int]) -> None:
        """Make the passes of a micro-batch without a gradient: those of other ranks need this one's shards."""
        part = pack(batch, rows, self._models.actor.device, self._inputs)
        outputs = self._outputs(part).values()
        self.optimisation.backward(torch.stack([output.sum() for output in outputs]).sum() * 0.0)

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

    @torch.no_grad()
    def _keep_whole(self) -> None:
        """Copy the trained weights to the models that are whole, in the process that keeps them."""
        if self._models is self._whole:
            return
        trained = dict(self._models.named_parameters())
        for name, kept in self._whole.named_parameters():
            if kept.requires_grad:
                weight = whole(trained[name])
                if not self._team.rank:
                    kept.copy_(weight)
