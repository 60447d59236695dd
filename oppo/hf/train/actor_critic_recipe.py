"""How the models that are trained are made on another machine; their trained weights come from rank 0."""

from __future__ import annotations

from dataclasses import dataclass

from oppo.hf.recipe import ModelRecipe
from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.trunk import value_model_on


@dataclass(frozen=True, slots=True, kw_only=True)
class ActorCriticRecipe:
    """How an actor, and its critic if it has one, are loaded for a rank on another machine.

    The rank is sent the trained weights by rank 0, so a head that was new need not be the same.

    Attributes:
        actor: of kind ``causal``.
        critic: of kind ``scalar``; ``None`` without a critic, or with one on the actor's trunk.
        shared_trunk: the critic is a head on the actor's trunk, see :func:`oppo.hf.value_model_on`.
    """

    actor: ModelRecipe
    critic: ModelRecipe | None = None
    shared_trunk: bool = False

    def load(self) -> ActorCritic:
        """Return the models.

        Raises:
            ConfigError, ModelRefused: see :meth:`ModelRecipe.load`.
        """
        actor = self.actor.load()
        if self.shared_trunk:
            return ActorCritic(actor, value_model_on(actor))
        return ActorCritic(actor, None if self.critic is None else self.critic.load())
