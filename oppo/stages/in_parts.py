"""InParts: groups go to the trainer as soon as each is scored, before the batch that they are parts of."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oppo.errors import ConfigError
from oppo.estimators import FixedKL
from oppo.events import Batch, BatchPart, Drop, FloatArray, RolloutEvent, Scored
from oppo.graph import Receiver, Sender
from oppo.numeric import require_whole
from oppo.stages.group import GroupRelative
from oppo.stages.scored_rollouts import ScoredRollout, ScoredRollouts


@dataclass(eq=False)
class InParts:
    """Sends each group of a step as a :class:`~oppo.events.BatchPart` once all of its responses are scored.

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
                f"{type(self.estimator).__name__} estimates advantages from the whole batch, so no group can be "
                "trained before: expected a GroupRelative, as in RLOO, GRPO and Dr. GRPO"
            )
        if self.estimator.shaping.norm:
            raise ConfigError("scores normalised by the moments of all cannot come in parts: leave norm out")
        if not isinstance(self.estimator.control, FixedKL):
            raise ConfigError("a KL coefficient that adapts to each batch cannot come in parts: give a number")

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        score: Receiver[Scored[float] | Drop],
        /,
        *,
        out: Sender[Batch | BatchPart],
        reference: Receiver[Scored[FloatArray] | Drop] | None = None,
        value: Receiver[Scored[FloatArray] | Drop] | None = None,
        proximal: Receiver[Scored[FloatArray] | Drop] | None = None,
    ) -> None:
        """Send groups as they are complete, then the step's batch; send nothing without a rollout."""
        groups = defaultdict[int, list[ScoredRollout]](list)

        async def send_complete(each: ScoredRollout) -> None:
            members = groups[each.group]
            members.append(each)
            if len(members) == self.samples and (part := self._early(members)).sampled.any():
                await out.send(BatchPart(part))

        scored = await ScoredRollouts.of(
            rollout, score, each=send_complete, reference=reference, values=value, proximal=proximal
        )
        if scored:
            await out.send(self.estimator.batch(scored.rollouts, scored.dropped, scored.deferred))

    def _early(self, members: Sequence[ScoredRollout]) -> Batch:
        """Return the part of the batch that a group is, and leave the estimator's state as it is."""
        return copy.copy(self.estimator).batch(sorted(members, key=lambda each: each.rollout))

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Return what the estimator finds wrong."""
        return self.estimator.faults(stages, named)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state of the estimator."""
        return self.estimator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self.estimator.load_state_dict(state)
