"""What trains transformers models where it is hosted: synchronous, on a loss of which nothing else is known here.

One update::

    batch ── epochs x minibatches ──> units ── by length, within a token budget ─> micro-batches
                  │                                                                   │ forward, loss, backward
                  └── clip, optimizer step (or none, where something is not finite) <─┘

A loss divides by the size of a whole minibatch, and its units (a token, a row, the rows of a group) are never split, so
how a minibatch is cut into micro-batches does not change its gradient. Dropout is off for the models' whole life: they
may be serving rollouts at any time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from oppo.durable import writing
from oppo.events import Batch
from oppo.hf.loading.models import quiet
from oppo.hf.lora import merged
from oppo.hf.shared_memory import SharedModel
from oppo.hf.train.actor_critic import ActorCritic, require_value_head
from oppo.hf.train.optimisation import Optimisation
from oppo.hf.train.packing import MicroBatch, micro_batches, minibatches, pack, units
from oppo.hf.train.precision import require_trainable
from oppo.hf.train.recompute import recompute
from oppo.hf.train.staleness_metrics import StalenessMetrics
from oppo.hf.train.update_metrics import UpdateMetrics
from oppo.hosted_trainer import TrainerCounts
from oppo.losses import Evaluated, Input, Inputs, Loss, Whole, entropies, token_logprobs
from oppo.losses.protocol import require_inputs, require_loss
from oppo.models import Sampling, Trained, Weights
from oppo.training import TrainerSettings


class HfTrainerCore:
    """Trains an actor, and its critic if it has one; implements :class:`oppo.hosted_trainer.TrainerCore`.

    Pickled, it crosses to another process as a trainer that has made no update, of models in the same memory.

    Args:
        models: what is trained; see :class:`oppo.hf.HfTrainer`.
        sampling: how the policy draws tokens.
        settings: everything about the optimisation.
        loss: what is minimised.
        counts: how far it is.

    Raises:
        ConfigError: there is no critic, but settings or a loss that are about one; or one, and no loss for it.
        ModelRefused: the critic has no single-label ``score`` head, a model has nothing to train or to recompute or is
            in float16.
    """

    def __init__(
        self, models: ActorCritic, sampling: Sampling, settings: TrainerSettings, loss: Loss, counts: TrainerCounts
    ) -> None:
        self.actor, self.critic = models.actor, models.critic
        self.settings, self.loss, self.counts = settings, loss, counts
        require_loss(loss, critic=self.critic is not None)
        self._asked = loss.reads | loss.measures
        if self.critic is None:
            settings.require_no_critic()
        else:
            require_value_head(self.critic)
        for model in filter(None, (self.actor, self.critic)):
            require_trainable(model)
            model.train(mode=False)
            if settings.gradient_checkpointing:
                recompute(model, settings.gradient_checkpointing)
        models.trained()
        self._models = models
        self._sampling = sampling

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (SharedModel(self._models), self._sampling, self.settings, self.loss, self.counts)

    @cached_property
    def optimisation(self) -> Optimisation:
        """The optimizer; made at its first use, so that its memory is taken where updates are made."""
        return Optimisation(self._models, self.settings)

    def weights(self) -> Weights:
        """Return the current weights, by reference."""
        critic = {} if self.critic is None else self.critic.state_dict()
        return Weights(self.counts.version, actor=self.actor.state_dict(), critic=critic)

    def write(self, directory: Path) -> None:
        """Write all that :meth:`restore` needs, and what is trained.

        Raises:
            OSError: it cannot be written.
        """
        self.optimisation.write(directory, {"version": self.counts.version, "episodes": self.counts.episodes})
        self.save(directory)

    def save(self, directory: Path) -> None:
        """Write what is trained, loadable by ``from_pretrained``, as ``directory/actor`` and ``directory/critic``.

        Raises:
            OSError: it cannot be written.
        """
        with quiet(), writing(directory / "actor"):
            self.actor.save_pretrained(directory / "actor")
        if self.critic is not None:
            with quiet(), writing(directory / "critic"):
                self.critic.save_pretrained(directory / "critic", state_dict=merged(self.critic))

    def restore(self, directory: Path) -> None:
        """Go on where the trainer that wrote ``directory`` was.

        Raises:
            CheckpointError: it was written of other models.
        """
        counts = self.optimisation.restore(directory)
        self.counts.version = self.counts.restored = counts["version"]
        self.counts.episodes = counts["episodes"]

    def update(self, batch: Batch) -> Trained:
        """Train on one batch; the version then is one more, even if every minibatch was skipped.

        A minibatch whose loss or gradient is not finite changes nothing but the report: its rollouts are in
        ``skipped``, each once, and in ``nonfinite`` where no other minibatch trained them.

        Raises:
            ConfigError: the loss reads log-probs that the batch does not have, or another ``Accelerator`` of the
                process accumulates gradients.
        """
        require_inputs(self.loss, batch)
        factor = self.settings.learning_rate_factor(self.counts.version)
        self.optimisation.scale(factor)
        counts = self._counted(batch) | {"lr": self.settings.learning_rate * factor}
        tally = UpdateMetrics(self.loss, StalenessMetrics(self.counts.version))
        try:
            for whole in self._minibatches(batch):
                self._step(batch, whole, tally)
        finally:  # what a failed update has accumulated must not reach the next one
            self.optimisation.clear()
        self.counts.episodes += len(batch)
        self.counts.version += 1
        skipped = tuple(rollout for rollout in batch.rollouts if rollout in tally.skipped)
        return Trained(
            metrics=tally.metrics() | counts | {"episode": float(self.counts.episodes)},
            nonfinite=tuple(rollout for rollout in skipped if rollout not in tally.stepped),
            skipped=skipped,
        )

    def _minibatches(self, batch: Batch) -> Iterator[list[list[int]]]:
        whole = units(batch, self.loss.unit)
        for epoch in range(self.settings.epochs):
            yield from minibatches(whole, self.settings.minibatches, (self.settings.seed, self.counts.version, epoch))

    def _step(self, batch: Batch, whole: list[list[int]], tally: UpdateMetrics) -> None:
        self.optimisation.require_every_step()
        rows = list(chain.from_iterable(whole))
        size, device = Whole.of(batch, rows), self.actor.device
        parts: list[Tensor] = []
        names: tuple[str, ...] = ()
        for group in micro_batches(batch, whole, device, self.settings.micro_batch_tokens):
            part = pack(batch, group, device, self._asked)
            evaluated = self._backward(part, size, tally.staleness)
            names = tuple(evaluated.measured)
            parts.append(torch.stack((*evaluated.measured.values(), evaluated.loss)).detach())
            tally.read(part)
            self.counts.micro_batches += 1
        tally.staleness.opening = False
        *measured, loss = torch.stack(parts).sum(0).tolist()
        norms = self.optimisation.clip()
        rollouts = {batch.responses[r].prompt.rollout for r in rows}
        if np.isfinite((loss, *norms)).all():
            self.optimisation.step()
            tally.measured.append(dict(zip(names, measured, strict=True)))
            tally.norms.append(norms)
            tally.stepped |= rollouts
        else:
            tally.minibatches_skipped += 1
            tally.skipped |= rollouts
        self.optimisation.clear()

    def _backward(self, part: MicroBatch, size: Whole, staleness: StalenessMetrics) -> Evaluated:
        """Add the gradient of a part of a minibatch; return what the loss says of it."""
        said = self._said(part)
        given = {name: tensor if name in self.loss.reads else tensor.detach() for name, tensor in said.items()}
        evaluated = self.loss(Inputs(part.mask, part.row, part.groups, size, {**part.given, **given}))
        staleness.add(part, said["logprobs"], evaluated)
        self.optimisation.backward(evaluated.loss)
        return evaluated

    def _said(self, part: MicroBatch) -> dict[Input, Tensor]:
        """Return what the models say of each token, as far as it is asked for: float32 [T]; log-probs in any case."""
        logits, values = self.optimisation.models(part, actor_learns=self.counts.version >= self.settings.critic_warmup)
        temperature = self._sampling.temperature
        said: dict[Input, Tensor] = {"logprobs": token_logprobs(logits, part.tokens, temperature, part.support)}
        if "entropies" in self._asked:
            spread = logits if "entropies" in self.loss.reads else logits.detach()
            said["entropies"] = entropies(spread, temperature, part.support)
        return said if values is None else {**said, "values": values}

    def _counted(self, batch: Batch) -> dict[str, float]:
        end = self._sampling.stop[:1]
        return {
            "val/num_eos_tokens": float(np.isin(batch.tokens, end).sum()),
            "train/tokens": float(batch.sampled.sum()),
        }
