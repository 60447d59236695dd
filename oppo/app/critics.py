"""The critic of a run: what it starts from, trained here, and served here or on another machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedModel

from oppo.app.reward_models import ServedRewardModel
from oppo.app.roles import RoleLoader
from oppo.config.settings import Settings
from oppo.hf.devices import Devices
from oppo.hf.recipe import Loadable
from oppo.hf.train.actor_critic import value_model_on
from oppo.log import logger


@dataclass(frozen=True, slots=True, eq=False)
class Critic:
    """A critic, or none.

    Attributes:
        trained: ``None`` without a critic.
        served: the same module; of one that is served on another machine, how it is loaded there.
        source: what it starts from; ``None`` without a critic, or on the actor's trunk.
    """

    trained: PreTrainedModel | None = None
    served: Loadable | None = None
    source: str | None = None

    @property
    def is_apart(self) -> bool:
        """Whether it is served from weights that were loaded apart from those that are trained: a head may be new."""
        return self.served is not self.trained


def load_critic(
    settings: Settings,
    actor: PreTrainedModel,
    rewards: Sequence[ServedRewardModel],
    load: RoleLoader,
    *,
    devices: Devices,
) -> Critic:
    """Return the critic of an algorithm with one."""
    models = settings.models
    if not settings.algorithm.has_critic:
        return Critic()
    if models.shared_trunk:
        trunk = value_model_on(actor)
        return Critic(trunk, trunk)
    source = critic_source(settings, [each.source for each in rewards if each.may_be_critic])
    if source != models.critic:
        logger.info(
            f"models.critic: {models.critic} does not read the policy's tokens one by one, so it cannot be a critic, "
            f"which starts from {'the policy' if source == models.policy else source} instead"
        )
    trained = load.critic(source)
    if "critic" not in devices.elsewhere:
        return Critic(trained, trained, source)
    return Critic(trained, load.recipe("critic", "scalar", source, devices.critic), source)


def critic_source(settings: Settings, fit: Sequence[str]) -> str:
    """Return what the critic starts from: its model, unless that is a reward model that cannot be a critic.

    Args:
        fit: the reward models that can; else the first of them, or the policy.
    """
    models = settings.models
    if models.critic in fit or models.critic not in settings.reward_models:
        return models.critic
    return next(iter(fit), models.policy)
