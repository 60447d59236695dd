"""InParts: the groups of a step go to the trainer as soon as each is scored, before the batch that they are parts of."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oppo.errors import ConfigError
from oppo.estimators import FixedKL
from oppo.events import Batch, Defer, Drop, Part
from oppo.graph import Sender
from oppo.numeric import require_whole
from oppo.stages.batch_stage import BatchStage
from oppo.stages.group import GroupRelative
from oppo.stages.scored_rollouts import ScoredRollout


@dataclass(eq=False)
class InParts(BatchStage):
    """Sends each group of a step as a :class:`~oppo.events.Part` once all of its responses are scored.

    The trainer accumulates its gradient while others are still being written. The step's batch follows, as the
    estimator makes it, and holds the same rows. Parts come in an order that depends on timing, and so does the sum of
    their gradients, by rounding.

    Attributes:
        estimator: compares the responses of a group.
        samples: responses to each prompt.

    Raises:
        ConfigError: the advantages of a group depend on the rest of the batch: the estimator is another one, scores are
            normalised by the moments of all, or the KL coefficient adapts.
    """

    estimator: GroupRelative
    samples: int

    def __post_init__(self) -> None:
        require_whole("samples", self.samples, 2, error=ConfigError)
        if not isinstance(self.estimator, GroupRelative):
            raise ConfigError(
                f"{type(self.estimator).__name__} estimates advantages from the whole batch, so no group can be trained "
                "before: expected a GroupRelative, as in RLOO, GRPO and Dr. GRPO"
            )
        if self.estimator.shaping.norm:
            raise ConfigError("scores normalised by the moments of all cannot come in parts: leave norm out")
        if not isinstance(self.estimator.control, FixedKL):
            raise ConfigError("a KL coefficient that adapts to each batch cannot come in parts: give a number")

    @property
    def refers(self) -> bool:
        """Whether log-probs of a reference are needed."""
        return self.estimator.refers

    def early(self, out: Sender[Batch | Part]) -> Callable[[ScoredRollout], Awaitable[None]]:
        """Return what sends a group when the last of its responses is scored."""
        groups = defaultdict[int, list[ScoredRollout]](list)

        async def send_complete(rollout: ScoredRollout) -> None:
            members = groups[rollout.group]
            members.append(rollout)
            if len(members) == self.samples:
                members.sort(key=lambda each: each.rollout)
                await out.send(Part(copy.copy(self.estimator).batch(members)))

        return send_complete

    def batch(
        self, rollouts: Sequence[ScoredRollout], dropped: Sequence[Drop] = (), deferred: Sequence[Defer] = ()
    ) -> Batch:
        """Return the estimator's batch of these rollouts."""
        return self.estimator.batch(rollouts, dropped, deferred)

    def estimated(self, batch: Batch) -> Batch:
        """Return the batch with what the estimator estimates."""
        return self.estimator.estimated(batch)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the estimator."""
        return self.estimator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.estimator.load_state_dict(state)
