"""BatchStage: the results of all scorers in, one batch out; what an advantage stage adds is what the batch holds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

from oppo.errors import ProtocolError, blaming, shown
from oppo.events import Batch, Defer, Drop, FloatArray, RolloutEvent, Scored
from oppo.graph import Receiver, Sender
from oppo.stages.scored_rollouts import ScoredRollout, ScoredRollouts


class BatchStage(ABC):
    """Joins the results of the scorers, and sends the batch that it makes of them.

    ``reference=``, ``value=`` and ``proximal=`` are inputs by name: log-probs of a reference, the values of a critic,
    and log-probs under the weights that are about to be updated, which corrections for stale tokens need. The batch
    holds those that are connected.
    """

    @property
    def refers(self) -> bool:
        """Whether log-probs of a reference are needed."""
        return False

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        score: Receiver[Scored[float] | Drop],
        /,
        *,
        out: Sender[Batch],
        reference: Receiver[Scored[FloatArray] | Drop] | None = None,
        value: Receiver[Scored[FloatArray] | Drop] | None = None,
        proximal: Receiver[Scored[FloatArray] | Drop] | None = None,
    ) -> None:
        """Send the step's batch once every finished rollout is scored; send nothing without a rollout."""
        scored = await ScoredRollouts.of(rollout, score, reference=reference, values=value, proximal=proximal)
        if scored:
            await out.send(self.batch(scored.rollouts, scored.dropped, scored.deferred))

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Return what is wrong if log-probs of a reference are needed, and not connected."""
        del stages
        fault = "has a KL penalty, which needs a reference: connect reference=stream, or set kl to 0"
        return [fault] if self.refers and "reference" not in named else []

    def batch(
        self, rollouts: Sequence[ScoredRollout], dropped: Sequence[Drop] = (), deferred: Sequence[Defer] = ()
    ) -> Batch:
        """Return the training batch of these rollouts, in their order, without the unfit ones.

        Raises:
            ProtocolError: an estimate does not have one number for each token, or no batch was estimated.
        """
        scored = ScoredRollouts(rollouts, dropped, deferred)
        plain = scored.batch()
        if drops := self.unfit(plain):
            plain = scored.without(drops).batch()
        name = f"{type(self).__name__}.estimated()"
        with blaming(name):
            batch: object = self.estimated(plain)
        if not isinstance(batch, Batch):
            raise ProtocolError(f"{name} must return a Batch; got {shown(batch)}")
        return batch

    def unfit(self, batch: Batch) -> Sequence[Drop]:
        """Return the drops of those rollouts of a batch without estimates that must not reach the others."""
        del batch
        return []

    @abstractmethod
    def estimated(self, batch: Batch) -> Batch:
        """Return a batch of scored rollouts, any number of them, with what this stage estimates, and metrics."""
