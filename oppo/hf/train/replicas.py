"""The models of each rank of a trainer: what is trained there, and where its weights come from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Final

import torch

from oppo.errors import ConfigError, ModelError
from oppo.hf.device import numbered
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.actor_critic_recipe import ActorCriticRecipe
from oppo.hf.train.sharding import shard
from oppo.hf.train.team import Ranked


@dataclass(frozen=True, slots=True)
class Replicas:
    """How the ranks of a trainer have its models.

    Attributes:
        shard, devices, recipe: see :class:`oppo.hf.HfTrainer`.
        loaded: this rank has loaded the models, which compute for it alone, and is sent the trained weights.
    """

    shard: bool = True
    devices: Sequence[torch.device] = ()
    recipe: ActorCriticRecipe | None = None
    loaded: bool = False

    def device(self, rank: int, size: int, models: ActorCritic) -> torch.device:
        """Return where a rank computes.

        Raises:
            ConfigError: there are not as many devices as ranks.
        """
        if self.devices and len(self.devices) != size:
            raise ConfigError(f"expected a device for each of {size} ranks, got {len(self.devices)}")
        return numbered(self.devices[rank]) if self.devices and not self.loaded else models.actor.device

    def of(self, whole: ActorCritic, team: Ranked) -> ActorCritic:
        """Return what a rank trains: ``whole`` itself, or a copy of it on the rank's device; its own shard of it.

        Raises:
            ModelRefused: a model cannot be sharded.
        """
        models = whole
        if not self.loaded and (team.rank or self.shard or team.device != whole.actor.device):
            models = whole.copied(team.device)
        if self.recipe is not None:  # a rank may have loaded other weights
            for weight in chain.from_iterable(models.trained()):
                weight.detach().copy_(team.broadcast(weight))
        if self.shard:
            shard(models, team.mesh)
        return models

    def elsewhere(self) -> tuple[ActorCriticRecipe, Replicas]:
        """Return how a rank on another machine makes its models, and how it has them.

        Raises:
            ModelError: that is not known.
        """
        if self.recipe is None:
            raise ModelError(
                "a trainer with a rank on another machine needs to know how its models are loaded there: expected "
                "HfTrainer(..., recipe=ActorCriticRecipe(actor=ModelRecipe(path=...)))"
            )
        return self.recipe, replace(self, loaded=True)


SHARDS: Final = Replicas()
"""Each rank has a shard, on the models' device."""
