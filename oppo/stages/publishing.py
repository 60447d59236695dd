"""Publishing: when the followers of a trainer get the weights of an update, and what rules that out."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from oppo.errors import ConfigError
from oppo.follower_protocols import name_of
from oppo.graph import Step
from oppo.models import Capabilities, Follower, Trainer, TrainsByReference
from oppo.stages.contract import require_published
from oppo.stages.following import Following
from oppo.stages.score import Score

_AT_THE_CUT = "name the stages that use them in Update.after (step.publish = 'cut')"


class Publishing:
    """The followers of a trainer, and the stages that use them.

    Args:
        trainer: owns the weights.
        followers: get them, in this order.
        after: names of the stages that must have returned in the later steps before they do; none: in flight.
        held: names of the stages that must have returned in the step before.
    """

    def __init__(
        self, trainer: Trainer, followers: Sequence[Follower], after: Sequence[str], held: Sequence[str] = ()
    ) -> None:
        self._trainer = trainer
        self._followers = followers
        self._after = tuple(after)
        self._held = tuple(held)
        self._followings = [each for each in followers if isinstance(each, Following)]
        self._checked = False

    def require_possible(self, step: Step) -> None:
        """Check, once for all steps, that with lookahead the followers can be given weights while they are used.

        Raises:
            ConfigError: they cannot.
        """
        if self._checked or not step.lookahead:
            return
        self.require_own_weights("with lookahead", "choose a lookahead of 0")
        for each in self._followings:
            each.pair(self._followers)
        if not self._after:
            for follower in self._followers:
                _require_in_flight(follower)
        self._checked = True

    def require_own_weights(self, when: str, otherwise: str) -> None:
        """Check that the trainer trains no tensor that a follower serves.

        Raises:
            ConfigError: it does; the words say when that matters, and what else helps.
        """
        trainer = self._trainer
        if not isinstance(trainer, TrainsByReference):
            return
        if shared := [name_of(each) for each in self._followers if trainer.shares_weights(each)]:
            raise ConfigError(
                f"{when} {', '.join(shared)} works while {type(trainer).__name__} trains, and they have tensors in "
                f"common: give the trainer copies of the models, or {otherwise}"
            )

    async def settled(self) -> None:
        """Wait until the trainer's tensors may change: until none of them waits to be served."""
        for each in self._followings:
            await each.settled()

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the last sync, of the followers that measure it as their ``sync_metrics``."""
        measured = [getattr(each, "sync_metrics", {}) for each in self._followers]
        return {name: value for metrics in measured for name, value in metrics.items()}

    async def publish(self, step: Step) -> float:
        """Give every follower the weights, when it may have them; return the seconds that this took after all waits.

        Raises:
            ProtocolError: a follower did not take them.
        """
        await step.previous(*self._held)
        await step.later(*self._after, *filter(None, (each.awaited(step) for each in self._followings)))
        start = anyio.current_time()
        given = [each.given_in(step) if isinstance(each, Following) else each for each in self._followers]
        with step.working("update", "publish"):
            await self._trainer.publish(*given)
        require_published(self._trainer, given)
        return anyio.current_time() - start


def _require_in_flight(follower: Follower) -> None:
    """Raise ``ConfigError`` unless a follower can be given weights while it works."""
    name, capabilities = name_of(follower), getattr(follower, "capabilities", None)
    if isinstance(capabilities, Capabilities) and capabilities.loads_while_decoding != "between decode steps":
        raise ConfigError(
            f"weights are published in flight, and {name} cannot adopt them between decode steps, by its "
            f"capabilities.loads_while_decoding = {capabilities.loads_while_decoding!r}: {_AT_THE_CUT}"
        )
    if isinstance(follower, Following) and follower.together:
        raise ConfigError(
            f"weights are published in flight, and {name} reads with tensors that another follower serves too, which "
            f"would change meanwhile: give it tensors of its own, or {_AT_THE_CUT}"
        )
    if hasattr(follower, "extend"):
        raise ConfigError(
            f"weights are published in flight, and {name} may be reading: publish to its stage, "
            "followers(policy, stage) with stage = Score(...)"
        )


def followers(*served: object) -> tuple[Follower, ...]:
    """Return what the trainer's weights are published to: the models that follow them, or their ``Score`` stages."""
    models = (each.follower if isinstance(each, Score) else each for each in served)
    return tuple(model for model in models if isinstance(model, Follower))
