"""The trainer on transformers: a handle on the event loop, and its core, which trains where the models live.

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

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from oppo.atomic_files import writing
from oppo.errors import ConfigError, ModelError
from oppo.events import Batch
from oppo.hf.devices import use_stream
from oppo.hf.expert_routing import LoadBalancing, RouterReplay, expert_loads, recorded_routes
from oppo.hf.head import token_measures
from oppo.hf.lora import adapter_matrices, has_adapters, merged
from oppo.hf.model_files import quiet
from oppo.hf.model_parts import pads_of, vocabulary
from oppo.hf.train.actor_critic import ActorCritic, ActorCriticRecipe, recompute
from oppo.hf.train.metrics import AUX, StalenessMetrics, Sums, UpdateMetrics
from oppo.hf.train.optim import Optimisation, gather_training, read_training, write_training
from oppo.hf.train.packing import (
    MicroBatch,
    longest_read,
    micro_batches,
    minibatches,
    pack,
    shares,
    shows_images,
    tokens_read,
    units,
)
from oppo.hf.train.ranks import SHARDS, Ranked, Replicas, Team, reset, whole
from oppo.hf.weights import SharedModel
from oppo.losses import Divided, Input, Inputs, Loss, LossValue, Whole, default_loss, top_logprobs
from oppo.losses.base import evaluated, require_inputs, require_loss
from oppo.models import Sampling, Trained, TrainerCapabilities, Weights
from oppo.placement import Hosting
from oppo.placement.trainer import HostedTrainer, TrainerCounts
from oppo.training import TrainerSettings

_COMPARED = (
    *("tokens", "sampled", "logprobs", "versions", "advantages", "proximal", "reference", "values", "returns"),
    *("teacher_ids", "teacher_top"),
)
"""The columns of a batch, a number or a row for each token, that a loss may read."""


@dataclass(slots=True, eq=False)
class PartialGradient:
    """The accumulated part of a batch; the gradient itself is held by the optimisation."""

    version: int  # of the weights that it is of
    parts: list[tuple[MicroBatch, Mapping[Input, Tensor], Tensor | None]] = field(default_factory=list)
    finite: bool = True  # whether all losses and gradients so far were
    _rows: dict[int, tuple[object, ...]] = field(default_factory=dict)

    def note(self, part: Batch) -> None:
        self._rows |= _contents(part)

    def holds(self, rollout: int) -> bool:
        return rollout in self._rows

    def is_of(self, batch: Batch, version: int) -> bool:
        """Whether it is finite, of these weights, and of rows that are all in ``batch``, as they are there."""
        return self.finite and self.version == version and self._rows.items() <= _contents(batch).items()


def _contents(batch: Batch) -> dict[int, tuple[object, ...]]:
    # The inputs of each row that an update may read, by rollout.
    columns: list[NDArray[Any] | None] = [getattr(batch, name) for name in _COMPARED]
    whole = [None if column is None else column.astype(np.float64) for column in columns]
    rows = zip(batch.responses, batch.scores.tolist(), shares(batch).tolist(), batch.rows(), strict=True)
    return {
        response.prompt.rollout: (
            response.prompt.group,
            score,
            share,
            *(None if each is None else each[span].tobytes() for each in whole),
        )
        for response, score, share, span in rows
    }


class HfTrainerCore:
    # Several processes that join() train together: the first keeps the weights and counts that the others have copies
    # or shards of.
    def __init__(
        self,
        models: ActorCritic,
        sampling: Sampling,
        settings: TrainerSettings,
        loss: Loss,
        counts: TrainerCounts,
        *,
        replicas: Replicas = SHARDS,
    ) -> None:
        self.actor, self.critic = models.actor, models.critic
        self.settings, self.loss, self.counts = settings, loss, counts
        require_loss(loss, critic=self.critic is not None)
        if self.critic is None:
            settings.require_no_critic()
        self._balancing = LoadBalancing.of(self.actor, settings.router_aux_loss)
        self._replay = RouterReplay.of(self.actor) if settings.router_replay else None
        models.trained()
        for model in filter(None, (self.actor, self.critic)):
            model.train(mode=False)
            if settings.gradient_checkpointing:
                recompute(model, settings.gradient_checkpointing)
        self._whole = self._models = models
        self._sampling = sampling
        self._inputs = loss.reads | loss.measures
        self._replicas = replicas
        self._team = Team()
        self._partial: PartialGradient | None = None

    def join(self, rank: int, size: int, meeting: str) -> None:
        device = self._replicas.device(rank, size, self._whole)
        use_stream(device)
        team = Ranked(rank, size, meeting, device)
        if rank:
            self.counts = self.counts.copy()
        self._whole.prepare()
        self._models, self._team = self._replicas.of(self._whole, team), team

    @cached_property
    def optimisation(self) -> Optimisation:
        # Created at its first use, so that its memory is allocated where updates are made.
        if not isinstance(self._team, Ranked):  # else they were prepared before they were sharded
            self._whole.prepare()
        return Optimisation(self._models, self.settings)

    def weights(self) -> Weights:
        critic = {} if self.critic is None else self.critic.state_dict()
        state, version = self.actor.state_dict(), self.counts.version
        if not has_adapters(self.actor):
            return Weights(version, actor=state, critic=critic)
        merge, adapters = partial(merged, self.actor, torch.float32), partial(adapter_matrices, self.actor)
        return Weights(version, actor=state, critic=critic, merge=merge, adapters=adapters)

    def write(self, directory: Path) -> None:
        counts = {"version": self.counts.version, "episodes": self.counts.episodes}
        tensors = gather_training(self.optimisation, self._team)
        self._team.once(lambda: write_training(directory, tensors, counts))
        self.save(directory)

    def save(self, directory: Path) -> None:
        self._team.once(partial(self._save, directory))

    def _save(self, directory: Path) -> None:
        with quiet(), writing(directory / "actor"):
            self.actor.save_pretrained(directory / "actor")
        if self.critic is not None:
            with quiet(), writing(directory / "critic"):
                self.critic.save_pretrained(directory / "critic", state_dict=merged(self.critic))

    def restore(self, directory: Path) -> None:
        self._discard()
        counts = read_training(directory, self.optimisation, self._team)
        self._keep_whole()
        self.counts.version = self.counts.restored = counts["version"]
        self.counts.episodes = counts["episodes"]

    def update(self, batch: Batch) -> Trained:
        # A minibatch whose loss or gradient is not finite makes no optimizer step: its rollouts are in `skipped`, each
        # once, and in `nonfinite` if no other minibatch trained them.
        self._discard()

        def learn(update: UpdateMetrics) -> None:
            rows = units(batch, self.loss.unit)
            for epoch in range(self.settings.epochs):
                key = self.settings.seed, self.counts.version, epoch
                for minibatch in minibatches(batch, rows, self.settings.minibatches, key):
                    self._step(batch, minibatch, update)

        return self._learned(batch, learn)

    def accumulate(self, part: Batch) -> None:
        self._require_a_sum()
        self._require_known(part)
        if self._partial is None or self._partial.version != self.counts.version:
            self._discard()
            self._partial = PartialGradient(self.counts.version)
        try:
            self._accumulate(part, units(part, self.loss.unit), self._partial)
        except BaseException:
            reset(self._models)
            self._discard()
            raise
        self._partial.note(part)

    def commit(self, batch: Batch) -> Trained:
        gradient, self._partial = self._partial, None
        if gradient is None or not gradient.is_of(batch, self.counts.version):
            return self.update(batch)
        rest = [unit for unit in units(batch, self.loss.unit) if not gradient.holds(batch.rollouts[unit[0]])]
        if rest:
            self._accumulate(batch, rest, gradient)
        if not gradient.finite:
            return self.update(batch)
        return self._learned(batch, lambda update: self._commit(batch, gradient, update))

    def _require_known(self, batch: Batch) -> None:
        require_inputs(self.loss, batch)
        if shows_images(batch) and (pads := np.isin(batch.tokens, pads_of(self._models.actor.config))).any():
            found = [batch.rollouts[row] for row, tokens in enumerate(batch.rows()) if pads[tokens].any()]
            raise ModelError(
                f"rollouts {found} have tokens in their responses that stand for images, and have none: such a token "
                "is never sampled (Sampling.barred) or given"
            )
        size, ids = vocabulary(self._models.actor), batch.teacher_ids
        if ids is not None and ids.size and ids.max() >= size:
            raise ModelError(
                f"the teacher lists the id {ids.max()}, and the table of {type(self._models.actor).__name__} has "
                f"{size} ids: give Sampling(vocabulary=...) the number that the policy knows"
            )

    def _require_a_sum(self) -> None:
        if self.settings.epochs > 1 or self.settings.minibatches > 1:
            raise ConfigError(
                f"a batch of {self.settings.epochs} epoch(s) and {self.settings.minibatches} minibatch(es) cannot be "
                "trained in parts, since weights change within it: set both to 1, or do not stream updates"
            )
        if not isinstance(self.loss, Divided) or self.loss.divisor is None:
            raise ConfigError(
                f"{type(self.loss).__name__} does not name one size that it divides by, so its gradient cannot be "
                "summed before the batch is complete: give it a divisor (oppo.losses.Divided), or do not stream updates"
            )
        if self._balancing.weight:
            raise ConfigError(
                "the load-balancing loss of a mixture of experts counts the tokens of the whole minibatch first: set "
                "trainer.router_aux_loss = 0, or do not stream updates"
            )

    def _accumulate(self, batch: Batch, rows: list[list[int]], gradient: PartialGradient) -> None:
        # Accumulates the gradient of the sum of these units' losses, if it is finite.
        self.optimisation.require_every_step()
        one = Whole(1.0, 1.0, 1.0, float(self._sampling.max_new_tokens))
        losses = [torch.zeros((), device=self._models.actor.device)]  # a rank may have no part of them
        for part in self._own_parts(batch, rows):
            with recorded_routes() as routes:
                outputs = self.outputs(part)
            losses.append(self.backward(part, outputs, one).loss.detach())
            detached = {name: tensor.detach() for name, tensor in outputs.items()}
            gradient.parts.append((part, detached, expert_loads(routes, part.read) if routes else None))
            self.counts.micro_batches += 1
        finite = torch.tensor([float(torch.stack(losses).isfinite().all() and self.optimisation.is_finite())])
        if self._team.sum(finite) == self._team.size:
            self.optimisation.hold()
        else:
            gradient.finite = False
        self.optimisation.clear()

    def _commit(self, batch: Batch, gradient: PartialGradient, update: UpdateMetrics) -> None:
        rows = list(chain.from_iterable(units(batch, self.loss.unit)))
        size, loss = Whole.of(batch, rows, self._sampling.max_new_tokens), cast("Divided", self.loss)
        self.optimisation.release(1 / getattr(size, str(loss.divisor)))
        found = Sums()
        with torch.no_grad():
            for part, outputs, loads in gradient.parts:
                value = self._evaluated(part, outputs, size)
                update.add(part, outputs["logprobs"], value, loads)
                found.add(value)
        self._apply(batch, rows, found, update)

    def _discard(self) -> None:
        self._partial = None
        self.optimisation.forget()

    def _learned(self, batch: Batch, learn: Callable[[UpdateMetrics], None]) -> Trained:
        self._require_known(batch)
        factor = self.settings.learning_rate_factor(self.counts.version)
        self.optimisation.scale(factor)
        update = UpdateMetrics(self.loss, StalenessMetrics(self.counts.version))
        try:
            learn(update)
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
                "val/num_eos_tokens": float(np.isin(batch.tokens[batch.sampled], self._sampling.stop).sum()),
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
        size, found = Whole.of(batch, rows, self._sampling.max_new_tokens), Sums()
        choices = self._choices(batch, minibatch)
        for part in self._own_parts(batch, minibatch):
            with recorded_routes() as routes:
                outputs = self.outputs(part)
            balance = None if choices is None else self._balancing.loss(routes, part.read, choices)
            value = self.backward(part, outputs, size, balance)
            update.add(part, outputs["logprobs"], value, expert_loads(routes, part.read) if routes else None)
            found.add(value)
            self.counts.micro_batches += 1
        self._apply(batch, rows, found, update)

    def _apply(self, batch: Batch, rows: list[int], found: Sums, update: UpdateMetrics) -> None:
        # The gradient was added; the step is made if all its numbers are finite.
        update.staleness.first_minibatch = False
        self._team.sum_gradients(chain.from_iterable(self.optimisation.weights))
        names, sums = found.over(self._team)
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

    @torch.no_grad()
    def _choices(self, batch: Batch, minibatch: list[list[int]]) -> Tensor | None:
        # One more pass: a micro-batch's part in the load-balancing loss depends on the choices of the whole minibatch.
        if not self._balancing.weight:
            return None
        total = torch.zeros(self._balancing.experts + 1, dtype=torch.int64, device=self._models.actor.device)
        for part in self._own_parts(batch, minibatch):
            with recorded_routes() as routes:
                self.optimisation.models(part, None)
            total += self._balancing.choices(routes, part.read)
        return self._team.sum(total)

    def _own_parts(self, batch: Batch, minibatch: list[list[int]]) -> Iterator[MicroBatch]:
        device, budget, packed = self._models.actor.device, self.settings.micro_batch_tokens, self._packs(batch)
        groups = list(micro_batches(batch, minibatch, device, budget, packed=packed))
        for mine in self._team.share([tokens_read(batch, group, packed=packed) for group in groups]):
            if mine is None:
                self._idle(batch, groups[-1][:1])
            else:
                yield self._packed(batch, groups[mine])

    def _packed(self, batch: Batch, rows: Sequence[int]) -> MicroBatch:
        part = pack(batch, rows, self._models.actor.device, self._inputs, packed=self._packs(batch))
        if self._replay is None:
            return part
        experts = self._replay.chosen(batch, rows, part.lengths, packed=part.packed)
        return replace(part, routed_experts=experts.to(part.ids.device))

    def _packs(self, batch: Batch) -> bool:
        return self._models.packs(longest_read(batch), images=shows_images(batch))

    def _idle(self, batch: Batch, rows: list[int]) -> None:
        # Passes without a gradient: other ranks' passes need this one's shards.
        part = self._packed(batch, rows)
        if not torch.is_grad_enabled():
            self.optimisation.models(part, None)
            return
        outputs = self.outputs(part).values()
        self.optimisation.backward(torch.stack([output.sum() for output in outputs]).sum() * 0.0)

    def backward(
        self, part: MicroBatch, outputs: Mapping[Input, Tensor], size: Whole, balance: Tensor | None = None
    ) -> LossValue:
        value = self._evaluated(part, outputs, size)
        if balance is not None:
            loss = value.loss + self._balancing.weight * balance
            value = replace(value, loss=loss, measured={**value.measured, AUX: balance})
        self.optimisation.backward(value.loss)
        return value

    def _evaluated(self, part: MicroBatch, outputs: Mapping[Input, Tensor], size: Whole) -> LossValue:
        inputs = {name: tensor if name in self.loss.reads else tensor.detach() for name, tensor in outputs.items()}
        given = {**part.given, **inputs}
        return evaluated(self.loss, Inputs(part.mask, part.rows, part.groups, size, given, part.shares))

    def outputs(self, part: MicroBatch) -> dict[Input, Tensor]:
        def measure(logits: Tensor, at: slice, again: bool) -> dict[Input, Tensor]:
            wanted, learnt = self.loss.reads if again else self._inputs, "entropies" in self.loss.reads
            given, sampling = (logits, part.tokens[at], part.support.slice(at.start, at.stop)), self._sampling
            found = {**token_measures(*given, sampling, entropy="entropies" in wanted, learnt=learnt)}
            if part.top_ids is not None and "top_logprobs" in wanted:
                likeliest = part.top_ids[at]
                found["top_logprobs"] = top_logprobs(logits[..., sampling.ids], likeliest, sampling.temperature)
            return found

        learns = self.counts.version >= self.settings.critic_warmup
        outputs, values = self.optimisation.models(part, measure, actor_learns=learns)
        return {**outputs} if values is None else {**outputs, "values": values}

    @torch.no_grad()
    def _keep_whole(self) -> None:
        # The models that are whole are in the process that keeps them.
        if self._models is self._whole and not self._team.rank:
            return
        kept = dict(self._whole.named_parameters())
        for name, trained in self._models.named_parameters():
            if trained.requires_grad:
                weight = whole(trained)
                if not self._team.rank:
                    kept[name].copy_(weight)


@dataclass(frozen=True, slots=True, eq=False)
class MakesCore:
    models: SharedModel[ActorCritic] | ActorCriticRecipe
    sampling: Sampling
    settings: TrainerSettings
    loss: Loss
    counts: TrainerCounts
    replicas: Replicas

    def __call__(self) -> HfTrainerCore:
        models = self.models.load()
        return HfTrainerCore(models, self.sampling, self.settings, self.loss, self.counts, replicas=self.replicas)

    def remote(self) -> Callable[[], HfTrainerCore]:
        # A copy on another machine gets the trained weights when it joins.
        recipe, replicas = self.replicas.remote()
        return partial(_remote, recipe, self.sampling, self.settings, self.loss, replicas)


def _remote(
    recipe: ActorCriticRecipe, sampling: Sampling, settings: TrainerSettings, loss: Loss, replicas: Replicas
) -> HfTrainerCore:
    return MakesCore(recipe, sampling, settings, loss, TrainerCounts.new(), replicas)()


class HfTrainer(HostedTrainer[HfTrainerCore]):
    """Trains a causal language model, and its critic if it has one; implements :class:`oppo.models.ResumableTrainer`.

    Weights with fewer bits than float32 are trained through float32 copies. A trunk that the two models share
    (:func:`oppo.hf.value_model_on`) is read once, and has the gradient of the sum of all losses. It has the actor's
    learning rate and clipping, and does not learn during the critic's warm-up.

    In a :class:`~oppo.placement.Process` both processes share the weights (:mod:`oppo.hf.weights`); the float32 copies
    and the optimizer's moments are in that process alone. In :class:`~oppo.placement.Ranks` several processes share the
    micro-batches of each update, sum the gradients, and make the same optimizer step. A checkpoint opens in any number
    of processes.

    Args:
        actor: a causal language model; the parameters that require a gradient are trained.
        critic: a sequence-classification model with one label: its head's output at the position before a response
            token is the value of the state in which the policy drew that token. ``None`` if advantages need no values
            (GRPO, RLOO).
        sampling: the policy's: its temperature divides the logits here too.
        place: where updates are made: any place.
        settings: everything about the optimisation.
        loss: by default :class:`oppo.losses.PPOLoss` with a critic, else :class:`oppo.losses.ClippedLoss`.
        shard: each of several ranks has a shard of weights, gradients and optimizer states (FSDP2, see
            :mod:`oppo.hf.train.ranks`); otherwise all of them.
        devices: of the ranks; the models' own when empty. Ranks on GPUs are given models on the CPU, which then
            hold the weights that are synced and saved.
        recipe: how ranks on other machines load the models; the trained weights they get from this one.

    Raises:
        ConfigError: settings or loss need a critic and there is none, or there is a critic and the loss ignores it.
        ModelError: models or loss cannot cross to another process, or there is no recipe for another machine.
        ModelRefused: the critic has no single-label ``score`` head, or a model has nothing to train, no layers to
            recompute, or is in float16.
    """

    def __init__(
        self,
        actor: PreTrainedModel,
        critic: PreTrainedModel | None = None,
        *,
        sampling: Sampling,
        place: Hosting,
        settings: TrainerSettings | None = None,
        loss: Loss | None = None,
        shard: bool = True,
        devices: Sequence[torch.device] = (),
        recipe: ActorCriticRecipe | None = None,
    ) -> None:
        make = MakesCore(
            SharedModel(ActorCritic(actor, critic)),
            sampling,
            settings or TrainerSettings(),
            default_loss(critic=critic is not None) if loss is None else loss,
            TrainerCounts.new(),
            Replicas(shard, devices, recipe),
        )
        super().__init__(make, place)

    @property
    def capabilities(self) -> TrainerCapabilities:
        """It takes a batch in parts, and may train the very tensors that a model serves."""
        return TrainerCapabilities(accumulates=True, trains_by_reference=True)

    async def accumulate(self, part: Batch) -> None:
        """Add the gradient of some rows of the coming batch; see :class:`oppo.models.StreamingTrainer`.

        Raises:
            ConfigError: the gradient of a batch is not a sum over its units: there are several epochs or minibatches,
                or the loss names no size that it divides by.
        """
        await self.given("accumulate", HfTrainerCore.accumulate, part)

    async def commit(self, batch: Batch) -> Trained:
        return await self.given("commit", HfTrainerCore.commit, batch)
