"""Update: a batch in, one report of the step out; the new weights are with every follower by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio
import numpy as np

from oppo.admission import bottleneck
from oppo.errors import ConfigError, ModelDiverged
from oppo.events import Batch, Drop, StepReport
from oppo.graph import Receiver, Sender, Step
from oppo.models import Follower, Trained, Trainer
from oppo.numeric import require_whole
from oppo.stages.contract import require_model, require_published, require_trained
from oppo.stages.lengths import LengthBias
from oppo.stages.measure import StepMetrics, observation
from oppo.stages.rows import NONFINITE

Dump: TypeAlias = Callable[[Batch], Path]
"""Writes a batch for people to look at; returns where."""


@dataclass(eq=False)
class Update:
    """Trains on each batch and publishes the weights.

    Attributes:
        trainer: owns the weights.
        publish: the served models that follow them; none decodes or scores this step's rollouts any more.
        max_nonfinite: the run ends after so many updates in a row in which something was not finite; 0: never.
        dump: writes the last batch of such a run.
    """

    trainer: Trainer
    publish: Sequence[Follower] = ()
    max_nonfinite: int = 3
    dump: Dump | None = None
    _nonfinite: int = field(default=0, init=False, repr=False)
    _lengths: LengthBias = field(default_factory=LengthBias, init=False, repr=False)

    def __post_init__(self) -> None:
        require_whole("max_nonfinite", self.max_nonfinite, 0, error=ConfigError)
        require_model(self.trainer, "Trainer", ("version", "update", "publish"))
        for follower in self.publish:
            require_model(follower, "Follower", ("version", "load"))

    def state_dict(self) -> Mapping[str, Any]:
        """Return how many of the last updates in a row were not finite, and the lengths of the last responses."""
        return {"nonfinite": self._nonfinite, "lengths": self._lengths.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on counting."""
        self._nonfinite = int(state["nonfinite"])
        self._lengths.load_state_dict(state["lengths"])

    async def run(self, batches: Receiver[Batch], /, *, out: Sender[StepReport], step: Step) -> None:
        """Train, publish, report.

        Raises:
            ModelDiverged: something was not finite in ``max_nonfinite`` updates in a row.
            ProtocolError: the trainer did not count its update, or left a follower without the new weights.
        """
        async for batch in batches:
            version = self.trainer.version
            scored = anyio.current_time()
            trained = await self.trainer.update(batch)
            updated = anyio.current_time()
            require_trained(trained, self.trainer, version, batch)
            self._watch(batch, trained)
            await self.trainer.publish(*self.publish)
            require_published(self.trainer, self.publish)
            end = anyio.current_time()
            untrained = set(trained.nonfinite)
            rollouts = batch.rollouts
            rows = [row for row, rollout in enumerate(rollouts) if rollout not in untrained]
            report = StepReport(
                index=step.index,
                version=self.trainer.version,
                trained=tuple(rollouts[row] for row in rows),
                dropped=(*batch.dropped, *(Drop(rollout, NONFINITE, nonfinite=True) for rollout in trained.nonfinite)),
                deferred=tuple(batch.deferred),
                score=float(np.mean(batch.scores[rows])) if rows else float("nan"),
                seconds=end - step.started,
                metrics={
                    **batch.metrics,
                    **composition(batch, version),
                    **self._bias(batch),
                    **trained.metrics,
                    **recorded_metrics(step),
                    "timing_s/rollouts": scored - step.started,
                    "timing_s/update": updated - scored,
                    "timing_s/publish": end - updated,
                },
            )
            await out.send(judged(report, step))

    def _bias(self, batch: Batch) -> Mapping[str, float]:
        bias = self._lengths.after(batch)
        return {} if bias is None else {"deferral/length_bias": bias}

    def _watch(self, batch: Batch, trained: Trained) -> None:
        """End the run if this was the last of too many updates in a row in which something was not finite."""
        broken = nonfinite(batch, trained)
        self._nonfinite = self._nonfinite + 1 if broken else 0
        if not self.max_nonfinite or self._nonfinite < self.max_nonfinite:
            return
        self._nonfinite = 0  # a graph can be run again
        error = ModelDiverged(
            f"something was not finite in {self.max_nonfinite} updates in a row, lastly for rollouts {list(broken)}: "
            "lower the learning rate or max_grad_norm, choose float32, or look at the reward of these rollouts"
        )
        if self.dump is not None:
            try:
                error.add_note(f"the batch of the last update is in {self.dump(batch)}")
            except Exception as failure:  # noqa: BLE001 - the boundary that may not hide what ends the run: it becomes a note
                error.add_note(f"and the batch of the last update could not be written: {failure}")
        raise error


def nonfinite(batch: Batch, trained: Trained) -> tuple[int, ...]:
    """Return the rollouts that say that training has diverged.

    Those of minibatches that were skipped, though others may have trained them; or, where nothing was left to train,
    those that were dropped because a number was not finite. One bad score among good ones does not count.
    """
    told = trained.skipped or trained.nonfinite
    if told or len(batch):
        return told
    return tuple(drop.rollout for drop in batch.dropped if drop.nonfinite)


def recorded_metrics(step: Step) -> Mapping[str, float]:
    """Return the metrics that stages have recorded; of one name the last counts."""
    return {name: value for _, metrics in step.recorded(StepMetrics) for name, value in metrics.values.items()}


def judged(report: StepReport, step: Step) -> StepReport:
    """Return the report with the bottleneck of its step among the metrics, where something was decoded."""
    found = bottleneck(observation(report, step))
    return report if found is None else replace(report, metrics={**report.metrics, **found.as_metrics()})


def composition(batch: Batch, version: int) -> Mapping[str, float]:
    """Return what the batch is made of: lengths, lags, deferrals.

    Args:
        version: version of the weights that are about to be updated; a token's lag is this minus its own version.
    """
    metrics = {
        "deferral/carried": float(len(batch.deferred)),
        "deferral/oldest_age": float(max((event.age for event in batch.deferred), default=0)),
        "deferral/dropped": float(len(batch.dropped)),
    }
    if not len(batch):
        return metrics
    lengths = np.diff(batch.offsets)
    lag = version - batch.versions[batch.sampled]
    late = [bool(version > response.versions[0]) for response in batch.responses if len(response)]
    return metrics | {
        "response_length/mean": float(lengths.mean()),
        "response_length/max": float(lengths.max()),
        "response_length/capped": float(np.mean([reason == "length" for reason in batch.reasons])),
        "response_length/tokens": float(lengths.sum()),
        "staleness/lag_mean": float(lag.mean()) if len(lag) else 0.0,
        "staleness/lag_max": float(lag.max()) if len(lag) else 0.0,
        "staleness/stale_tokens": float((lag > 0).mean()) if len(lag) else 0.0,
        "staleness/lag_0": float((lag == 0).mean()) if len(lag) else 0.0,
        "staleness/lag_1": float((lag == 1).mean()) if len(lag) else 0.0,
        "staleness/lag_2plus": float((lag > 1).mean()) if len(lag) else 0.0,
        "deferral/trained_late": float(np.mean(late)) if late else 0.0,
    }


def followers(*models: object) -> tuple[Follower, ...]:
    """Return those of the models whose weights follow the trainer's."""
    return tuple(model for model in models if isinstance(model, Follower))
