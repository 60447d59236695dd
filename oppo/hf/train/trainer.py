"""The trainer on transformers and accelerate: a handle on the event loop to the core that trains in a place."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from oppo.events import Batch
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.actor_critic_recipe import ActorCriticRecipe
from oppo.hf.train.core import HfTrainerCore
from oppo.hf.train.replicas import Replicas
from oppo.hosted_trainer import HostedTrainer, TrainerCounts
from oppo.losses import Loss, default_loss
from oppo.models import Sampling, Trained
from oppo.placement import Hosting
from oppo.training import TrainerSettings


class HfTrainer(HostedTrainer[HfTrainerCore]):
    """Trains a causal language model, and its critic if it has one; implements :class:`oppo.models.ResumableTrainer`.

    The metrics are those of the loss, of the tokens' staleness, and of the work done.

    Weights with fewer bits than float32 are trained through float32 copies, see :mod:`oppo.hf.train.master_weights`.

    A trunk that the two models share (:func:`oppo.hf.trunk.value_model_on`) is read once, and its gradient is that of
    the sum of all losses. It belongs to the actor: it has the actor's learning rate, is clipped with the actor, and
    does not learn during the critic's warm-up, which trains the value head only.

    In a :class:`~oppo.placement.Process` the weights lie in memory that both processes share, see
    :mod:`oppo.hf.shared_memory`: the models given here compute with the trained weights. The float32 copies and the
    optimizer's moments are in that process alone.

    In :class:`~oppo.placement.Ranks` several processes make each update together, by ``torch.distributed``: they share
    the micro-batches, sum the gradients, and all make the same optimizer step. A checkpoint is that of one process, and
    opens in any number of them.

    Args:
        actor: a causal language model; the parameters that require a gradient are trained.
        critic: a sequence-classification model with one label: its head's output at the position before a response
            token is the value of the state in which the policy drew that token. ``None`` if advantages need no values
            (GRPO, RLOO); no value loss is then computed, reported or saved.
        sampling: the policy's: its temperature divides the logits here too. (The ids that it left out come with the
            tokens, as their support.)
        thread: where updates are made: any place.
        settings: everything about the optimisation.
        loss: PPO's by default, :class:`oppo.losses.PPOLoss` with a critic, else :class:`oppo.losses.ClippedLoss`.
        shard: where there are several ranks, each has a shard of weights, gradients and optimizer states (FSDP2, see
            :mod:`oppo.hf.train.sharding`); otherwise each has all of them.
        devices: of the ranks; those of the models when empty. Ranks on GPUs are given models on the CPU, which then
            hold the weights that are published and saved.
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
        thread: Hosting,
        settings: TrainerSettings | None = None,
        loss: Loss | None = None,
        shard: bool = True,
        devices: Sequence[torch.device] = (),
        recipe: ActorCriticRecipe | None = None,
    ) -> None:
        core = HfTrainerCore(
            ActorCritic(actor, critic),
            sampling,
            settings or TrainerSettings(),
            default_loss(critic=critic is not None) if loss is None else loss,
            TrainerCounts.new(),
            replicas=Replicas(shard, devices, recipe),
        )
        super().__init__(core, thread)

    async def accumulate(self, part: Batch) -> None:
        """Add the gradient of some rows of the coming batch; see :class:`oppo.models.StreamingTrainer`.

        Raises:
            ConfigError: the gradient of a batch is not a sum over its units: there are several epochs or minibatches,
                or the loss names no size that it divides by.
        """
        await self.given("accumulate", HfTrainerCore.accumulate, part)

    async def commit(self, batch: Batch) -> Trained:
        """Train on a batch, some rows of which were accumulated."""
        return await self.given("commit", HfTrainerCore.commit, batch)
