"""Update: a batch in, the step's report out; every model has been given the new weights by then.

A token trained in step ``t`` is at most ``max_deferrals + lookahead`` updates older than the weights that are updated.
Proof: step ``j`` begins when step ``j - 1 - lookahead`` has ended, and a step ends after its update is synced, so a
token written in step ``j`` has version ``j - lookahead`` or a newer one. Its rollout enters step ``i``, at the start or
while others are decoded, and is deferred once for each step from then to its training, so ``i <= j <= t``, and
``t <= i + max_deferrals`` where each rollout of that age has a place in the batch. It has: the cut waits for it, and at
most ``overcommit <= batch`` units are deferred into a step. For a step owns at most ``batch + overcommit`` units, and
units that join it while it is decoded are counted: when ``batch`` of them are placed, at most ``overcommit`` are not.
Rejected units leave their step, and others take their places by the same count. Step ``t`` updates version ``t``, so
a token is at most ``t - (j - lookahead) <= max_deferrals + lookahead`` versions stale. Weights that are synced earlier,
in flight, only make it fewer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias, cast

import anyio
import numpy as np
from numpy.typing import NDArray

from oppo.admission import bottleneck
from oppo.declared import Count, validated
from oppo.errors import ConfigError, ModelDiverged, ProtocolError, promised
from oppo.events import Batch, Drop, StepReport, described
from oppo.graph import Receiver, Sender, Step
from oppo.models import (
    Capabilities,
    Passes,
    StreamingTrainer,
    SyncedModel,
    Trained,
    Trainer,
    TrainerCapabilities,
    name_of,
    require_model,
)
from oppo.stages.batch import NONFINITE, BatchPart, Ended
from oppo.stages.generate import Generate
from oppo.stages.metrics import ACCUMULATE, LengthBias, observation, run_metrics, step_metrics, utilisation
from oppo.stages.sync import WeightSync

LEFT_OUT = "left out of the loss"  # reason of a drop for a response of the batch without a token in the loss mask

Dump: TypeAlias = Callable[[Batch], Path]  # writes a batch for inspection; returns its path


@dataclass(eq=False)
@validated(ConfigError)
class Update:
    """Trains on each batch and syncs weights.

    Attributes:
        trainer: owns the weights.
        synced: the served models that get them, as :func:`synced_models` returns them; without lookahead idle by the
            time of the update.
        after: names of the stages that use these models, but for models that a :class:`~oppo.stages.Score` reads with,
            which knows when it takes new weights. With lookahead the weights are synced when these stages have
            returned in the later steps that are alive: the weights that a step uses then depend on its index and the
            lookahead alone. When empty, they are synced in flight: as soon as there are new ones, between two decode
            steps of the policy.
        held: names of stages that use these models when the update is over, as an evaluation does: the weights are
            synced when these have returned in the step before.
        max_nonfinite: number of consecutive updates with a number that is not finite that ends the run; 0: never.
        dump: writes the last batch of such a run.
        ideal: the costs of what stages read, by their names, at the most that all devices of such a stage can do.
    """

    trainer: Trainer
    synced: Sequence[SyncedModel] = ()
    after: Sequence[str] = ()
    held: Sequence[str] = ()
    max_nonfinite: Count = 3
    dump: Dump | None = None
    ideal: Mapping[str, Passes] = field(default_factory=dict)
    _parts: int = field(default=0, init=False, repr=False)
    _nonfinite: int = field(default=0, init=False, repr=False)
    _ended: float = field(default=-math.inf, init=False, repr=False)
    _lengths: LengthBias = field(default_factory=LengthBias, init=False, repr=False)
    _sync: WeightSync = field(init=False, repr=False)

    def __post_init__(self) -> None:
        require_model(self.trainer, "Trainer", ("version", "update", "sync_weights"))
        for model in self.synced:
            require_model(model, "SyncedModel", ("version", "load"))
        require_supports(self.synced)
        self._sync = WeightSync(self.trainer, self.synced, self.after, self.held)

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Report a policy of the graph that never gets weights, of this stage or of another that trains."""
        del named
        synced = [model for each in stages if isinstance(each, Update) for model in each.synced]
        return [
            f"never gives its weights to {type(each.policy).__name__}, which decodes: name it, "
            "Update(trainer, synced=[policy, ...])"
            for each in stages
            if isinstance(each, Generate) and not any(model is each.policy for model in synced)
        ]

    def state_dict(self) -> Mapping[str, Any]:
        """Return the number of consecutive nonfinite updates, and the lengths of the last responses."""
        return {"nonfinite": self._nonfinite, "lengths": self._lengths.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both."""
        self._nonfinite = int(state["nonfinite"])
        self._lengths.load_state_dict(state["lengths"])

    async def run(self, batches: Receiver[Batch | BatchPart], /, *, out: Sender[StepReport], step: Step) -> None:
        """Train, sync, report; a trainer that can accumulates the parts of the batch that come before it.

        Raises:
            ConfigError: the run looks ahead, and the synced models cannot take weights meanwhile: the trainer trains
                the tensors that one of them serves, or they would change where ``after`` does not wait.
            ModelDiverged: ``max_nonfinite`` consecutive updates had a number that is not finite.
            ProtocolError: the trainer did not count its update, or a model did not get the new weights.
        """
        self._sync.require_possible(step)
        whole: Batch | None = None
        async for batch in batches:
            if isinstance(batch, BatchPart):
                await self._accumulate(batch, step)
                continue
            if whole is not None:
                raise ProtocolError(
                    f"stage {_sender(batches)!r} sent a second batch, and a step trains one: merge them"
                )
            whole = batch
            _require_once(whole, step, batches)
            version = self.trainer.version
            scored = anyio.current_time()
            await self._sync.settled()
            begun = anyio.current_time()
            with step.working("update"):
                trained = await self._train(batch)
            updated = anyio.current_time()
            require_trained(trained, self.trainer, version, batch)
            self._require_finite(batch, trained)
            syncing = await self._sync.sync(step)
            end = anyio.current_time()
            rollouts = batch.rollouts
            rows = [row for row, rollout in enumerate(rollouts) if rollout not in trained.nonfinite]
            scored_rows = [row for row in batch.firsts if rollouts[row] not in trained.nonfinite]
            left_out = {rollouts[row] for row, tokens in enumerate(batch.sampled_rows()) if not len(tokens)}
            bias = self._lengths.after(batch)
            seconds = end - (max(step.started, self._ended) if step.ahead else step.started)
            composed = composition(batch, version)
            report = StepReport(
                index=step.index,
                version=self.trainer.version,
                trained=tuple(rollouts[row] for row in rows if rollouts[row] not in left_out),
                dropped=(
                    *batch.dropped,
                    *(Drop(rollout, NONFINITE, nonfinite=True) for rollout in trained.nonfinite),
                    *(Drop(rollout, LEFT_OUT) for rollout in rollouts if rollout in left_out),
                ),
                deferred=tuple(batch.deferred),
                score=float(np.mean(batch.scores[scored_rows])) if scored_rows else float("nan"),
                seconds=seconds,
                metrics={
                    **batch.metrics,
                    **run_metrics(step, seconds, composed.get("response_length/tokens")),
                    **composed,
                    **({} if bias is None else {"deferral/length_bias": bias}),
                    **trained.metrics,
                    **step_metrics(step),
                    "timing_s/rollouts": scored - step.started,
                    "timing_s/update": updated - begun,
                    "timing_s/weight_sync": syncing,
                    **self._sync.metrics,
                    **utilisation(step, batch, self.ideal),
                },
            )
            found = bottleneck(observation(report, step))
            if found is not None:
                report = replace(report, metrics={**report.metrics, **found.as_metrics()})
            self._ended = end
            await out.send(report)
        _require_once(whole, step, batches)

    async def _accumulate(self, part: BatchPart, step: Step) -> None:
        if not TrainerCapabilities.of(self.trainer).accumulates:
            raise ConfigError(
                f"the batch comes in parts, and {type(self.trainer).__name__} takes it whole: leave InParts out, or "
                "give a trainer with capabilities.accumulates (oppo.models.StreamingTrainer)"
            )
        self._sync.require_own_weights("with a batch in parts", "leave InParts out")
        with step.working("other", ACCUMULATE):
            await cast("StreamingTrainer", self.trainer).accumulate(part.batch)
        self._parts += 1

    async def _train(self, batch: Batch) -> Trained:
        parts, self._parts = self._parts, 0
        if parts:
            return await cast("StreamingTrainer", self.trainer).commit(batch)
        return await promised(self.trainer.update(batch), "update() of the trainer")

    def _require_finite(self, batch: Batch, trained: Trained) -> None:
        rollouts = nonfinite(batch, trained)
        self._nonfinite = self._nonfinite + 1 if rollouts else 0
        if not self.max_nonfinite or self._nonfinite < self.max_nonfinite:
            return
        self._nonfinite = 0  # a graph can be run again
        advice = "lower the learning rate or max_grad_norm, choose float32, or look at the reward of these rollouts"
        if estimates := [name for name, column in batch.estimates.items() if not np.isfinite(column).all()]:
            advice = f"the {' and '.join(estimates)} came so from their stage: look at its formula"
        error = ModelDiverged(
            f"something was not finite in {self.max_nonfinite} updates in a row, lastly for rollouts {list(rollouts)}: "
            f"{advice}"
        )
        if self.dump is not None:
            try:
                error.add_note(f"the batch of the last update is in {self.dump(batch)}")
            except Exception as failure:  # noqa: BLE001 - may not hide the error that ends the run: it becomes a note
                error.add_note(f"and the batch of the last update could not be written: {failure}")
        raise error


def require_supports(synced: Sequence[SyncedModel]) -> None:
    for policy in synced:
        capabilities = getattr(policy, "capabilities", None)
        if isinstance(capabilities, Capabilities) and not capabilities.supports:
            raise ConfigError(
                f"{name_of(policy)} does not report from which ids it draws each token (capabilities.supports), "
                "and a trainer's log-probs are over these: let it draw from all ids (top_p = 1), or bound them in a "
                "way that it reports (top_k)"
            )


def require_trained(trained: Trained, trainer: Trainer, before: int, batch: Batch) -> None:
    if not isinstance(trained, Trained):
        raise ProtocolError(
            f"update() of the trainer must return oppo.models.Trained(metrics, ...); got {described(trained)}"
        )
    if trainer.version != before + 1:
        raise ProtocolError(f"after an update of version {before} the trainer's is {trainer.version}, not {before + 1}")
    strangers = sorted({*trained.nonfinite, *trained.skipped} - set(batch.rollouts))
    if strangers:
        raise ProtocolError(f"the update names rollouts {strangers} as not finite, which are not in its batch")


def _require_once(batch: Batch | None, step: Step, batches: Receiver[Batch | BatchPart]) -> None:
    for _, ended in step.recorded(Ended):
        if fault := ended.fault_of(batch):
            sent = "the batch of stage {!r}" if batch is not None else "stage {!r} sent no batch, which"
            raise ProtocolError(f"{sent.format(_sender(batches))} {fault}")


def _sender(batches: Receiver[Batch | BatchPart]) -> str:
    return str(getattr(batches, "name", "another stage")).partition("->")[0]


def nonfinite(batch: Batch, trained: Trained) -> tuple[int, ...]:
    """Return the rollouts that indicate divergence: of skipped minibatches, even if another minibatch had them too."""
    # Of an empty batch, the rollouts dropped for a number that is not finite: one bad score among good ones is none.
    untrained = trained.skipped or trained.nonfinite
    if untrained or len(batch):
        return untrained
    return tuple(drop.rollout for drop in batch.dropped if drop.nonfinite)


def composition(batch: Batch, version: int) -> Mapping[str, float]:
    metrics = {
        "deferral/deferred": float(len(batch.deferred)),
        "deferral/oldest_age": float(max((event.age for event in batch.deferred), default=0)),
        "deferral/dropped": float(len(batch.dropped)),
    }
    if not len(batch):
        return metrics
    lengths, prompts = np.diff(batch.offsets), np.array([len(each.prompt.tokens) for each in batch.responses])
    capped, scores = np.array([reason == "length" for reason in batch.reasons]), batch.scores[batch.firsts]
    staleness = version - batch.versions[batch.sampled]
    if not capped.all():
        metrics["response_length/mean_uncapped"] = _mean(lengths[~capped])
    return metrics | {
        "objective/scores_min": float(scores.min()),
        "objective/scores_max": float(scores.max()),
        **_estimates(batch),
        "prompt_length/mean": _mean(prompts),
        "prompt_length/min": float(prompts.min()),
        "prompt_length/max": float(prompts.max()),
        "response_length/mean": _mean(lengths),
        "response_length/min": float(lengths.min()),
        "response_length/max": float(lengths.max()),
        "response_length/capped": _mean(capped),
        "response_length/tokens": float(lengths.sum()),
        "throughput/tokens": float(lengths.sum() + prompts.sum()),
        "staleness/mean": _mean(staleness),
        "staleness/max": float(staleness.max(initial=0)),
        "staleness/stale_tokens": _mean(staleness > 0),
        "staleness/share_0": _mean(staleness == 0),
        "staleness/share_1": _mean(staleness == 1),
        "staleness/share_2plus": _mean(staleness > 1),
    }


def _estimates(batch: Batch) -> Mapping[str, float]:
    estimates = (batch.advantages, batch.returns, batch.values)
    advantages, returns, values = (None if each is None else each[batch.sampled].astype(float) for each in estimates)
    metrics = {}
    if advantages is not None:
        metrics["advantages/mean"] = _mean(advantages)
    if advantages is not None and len(advantages):
        metrics |= {"advantages/min": float(advantages.min()), "advantages/max": float(advantages.max())}
    if returns is not None:
        metrics["returns/mean"] = _mean(returns)
    if values is not None and len(values):
        metrics |= {"values/mean": _mean(values), "values/min": float(values.min()), "values/max": float(values.max())}
    if values is not None and returns is not None and len(returns) and (spread := float(np.var(returns))):
        metrics["val/explained_variance"] = 1 - float(np.var(returns - values)) / spread
    return metrics


def _mean(values: NDArray[np.number[Any]] | NDArray[np.bool_]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
