"""Training transformers models, through accelerate, in any place; what is done there is in its core."""

from __future__ import annotations

from transformers import PreTrainedModel

from oppo.hf.train.actor_critic import ActorCritic
from oppo.hf.train.core import HfTrainerCore
from oppo.hosted_trainer import HostedTrainer, TrainerCounts
from oppo.losses import Loss, default_loss
from oppo.models import Sampling
from oppo.placement import Hosting
from oppo.training import TrainerSettings


class HfTrainer(HostedTrainer[HfTrainerCore]):
    """Trains a causal language model, and its critic if it has one; implements :class:`oppo.models.ResumableTrainer`.

    The metrics are those of the loss, how far stale tokens had drifted, and the work done.

    Weights of fewer bits than float32 are trained through float32 copies, see :mod:`oppo.hf.train.master_weights`.

    Where the two models share their trunk (:func:`oppo.hf.trunk.value_model_on`) it is read once, and gets the gradient
    of the sum of all losses. It counts as the actor's: it has the actor's learning rate, its gradient is clipped with
    the actor's, and while the critic is warmed up it rests, so that only the value head learns then.

    In a :class:`~oppo.placement.Process` the weights lie in memory that both processes see, see
    :mod:`oppo.hf.shared_memory`: the models given here compute with what is trained there. The float32 copies and the
    optimizer's moments are in that process alone.

    Args:
        actor: a causal language model; the parameters that require a gradient are trained.
        critic: a sequence-classification model with one label: its head's output at the position before a response
            token is the value of the state in which that token was chosen. ``None``: advantages need none (GRPO, RLOO),
            and nothing of a value loss is computed, reported or saved.
        sampling: how the policy draws tokens: its temperature divides the logits here too. (What it left out comes with
            the tokens, as their support.)
        thread: where updates are made: any place.
        settings: everything about the optimisation.
        loss: what is minimised; unless given, PPO's: :class:`oppo.losses.PPOLoss` where there is a critic, else
            :class:`oppo.losses.ClippedLoss`.

    Raises:
        ConfigError: there is no critic, but settings or a loss that are about one; or one, and no loss for it.
        ModelError: models or loss cannot go to another process.
        ModelRefused: the critic has no single-label ``score`` head, a model has nothing to train or to recompute or is
            in float16.
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
    ) -> None:
        core = HfTrainerCore(
            ActorCritic(actor, critic),
            sampling,
            settings or TrainerSettings(),
            default_loss(critic=critic is not None) if loss is None else loss,
            TrainerCounts.new(),
        )
        super().__init__(core, thread)
