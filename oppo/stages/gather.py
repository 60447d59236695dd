"""Gather: scored rollouts in, one batch out, without advantages: for a training step that estimates them itself."""

from __future__ import annotations

from dataclasses import dataclass, replace

from oppo.events import Batch, Drop, FloatArray, RolloutEvent, Scored
from oppo.graph import Receiver, Sender
from oppo.stages.scored_rollouts import ScoredRollouts


@dataclass(eq=False)
class Gather:
    """Joins the results of the scorers into a batch whose rewards and advantages are 0 and whose returns are ``None``.

    ``reference=``, ``value=`` and ``proximal=`` are inputs by name. A rollout that is dropped, or has a result that is
    not finite, is left out.
    """

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
            batch = scored.batch()
            metrics = {"objective/scores": float(batch.scores.mean())} if len(batch) else {}
            await out.send(replace(batch, metrics=metrics))
