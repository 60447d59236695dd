"""Gather: scored rollouts in, one batch out, without advantages: for a training step that estimates them itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oppo.events import Batch
from oppo.stages.batch_stage import BatchStage


@dataclass(eq=False)
class Gather(BatchStage):
    """Joins the results of the scorers into a batch without rewards, advantages and returns.

    The inputs by name are those of :class:`BatchStage`. A rollout that is dropped, or has a result that is not finite,
    is left out.
    """

    def estimated(self, batch: Batch) -> Batch:
        """Return the batch with the mean of its scores."""
        return replace(batch, metrics={"objective/scores": float(batch.scores.mean())} if len(batch) else {})
