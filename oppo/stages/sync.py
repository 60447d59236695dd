"""Weight sync in a graph: when the synced models of a trainer get the weights of an update, and when they cannot.

A scorer that follows the trainer takes its weights between two of its steps::

    lookahead = 1      update   | k         | k + 1     |        gives the weights of its step, and goes on
                       value      | k + 1     | k + 2     |      takes those of step k between these two steps

With lookahead n a step is scored with the weights of the update n + 1 steps before it, at any speed. An update does not
wait until its weights are taken. They wait in the trainer's own memory with a lookahead of 1, where the next update
needs this stage's values anyway, and in a copy with more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import cast

import anyio

from oppo.errors import ConfigError, ProtocolError, as_itself, noted, promised
from oppo.graph import Step
from oppo.models import (
    BorrowsWeights,
    Capabilities,
    CopiesWeights,
    ServesByReference,
    SyncedModel,
    SyncsByReference,
    Trainer,
    TrainerCapabilities,
    Weights,
    model_behind,
    name_of,
    share_tensors,
)


@dataclass(frozen=True, slots=True, eq=False)
class _Waiting:
    """Weights of a step's update that are not served yet; ``borrowed``: in the trainer's own memory."""

    step: int
    weights: Weights
    borrowed: bool


class ScorerWeights:
    """The weights of a scorer that the trainer syncs; they change only while its stage neither reads nor scores."""

    def __init__(self, scorer: SyncedModel, *, newest: bool = False) -> None:
        self.scorer = scorer
        self._newest = newest  # are served at once, for a stage that waits for each update
        self.together = False  # whether another synced model serves tensors of the scorer
        self._reading = anyio.Lock(fast_acquire=True)
        self._waiting: deque[_Waiting] = deque()
        self._served = anyio.Event()
        self._stage = ""
        self._returned = -1
        self.updated: Step | None = None  # the step whose update is being synced

    @property
    def stands_for(self) -> SyncedModel:
        return self.scorer

    @property
    def version(self) -> int:
        # Of the weights that it was given last; the scorer's own names the weights in use.
        return self._waiting[-1].weights.version if self._waiting else self.scorer.version

    def reading(self) -> AbstractAsyncContextManager[object]:
        """Return a context in which the weights do not change: from accepting events until they are read or scored."""
        return self._reading

    def serves(self, weights: Weights) -> bool:
        return isinstance(self.scorer, ServesByReference) and self.scorer.serves(weights)

    def tensors(self) -> frozenset[int]:
        return self.scorer.tensors() if isinstance(self.scorer, ServesByReference) else frozenset()

    # For the stage that trains.

    def pair(self, synced: Iterable[SyncedModel]) -> None:
        """Note the other synced models of the trainer; those that serve the same tensors change together."""
        others = (model_behind(each) for each in synced if each is not self)
        self.together = any(share_tensors(self.scorer, each) for each in others)

    def awaited(self, step: Step) -> str:
        """Return the stage that must have returned in later steps before weights may be given; mostly none."""
        can_wait = step.lookahead == 1 or isinstance(self.scorer, CopiesWeights)
        return "" if self._newest or not step.lookahead or (can_wait and not self.together) else self._stage

    async def settled(self) -> None:
        """Wait until nothing waits in the trainer's own memory, which may then change."""
        while any(each.borrowed for each in self._waiting):
            self._served = anyio.Event()
            await self._served.wait()

    async def starved(self) -> None:
        # The weights that it had are served until it takes new ones.
        await anyio.sleep_forever()

    async def load(self, weights: Weights) -> None:
        """Serve weights, or keep them until the step for which they are due."""
        step = self.updated
        if (
            step is None
            or step.index <= self._returned - step.lookahead
            or self._newest
            or not (step.lookahead and self._stage)
            or self.awaited(step)
        ):
            await self._load(weights)
        elif step.lookahead > 1 and isinstance(self.scorer, CopiesWeights):
            self._waiting.append(_Waiting(step.index, await self.scorer.copied(weights), borrowed=False))
        else:
            self._waiting.append(_Waiting(step.index, weights, borrowed=True))

    async def _load(self, weights: Weights) -> None:
        async with self._reading:
            await promised(self.scorer.load(weights), "load() of the scorer")

    # For the stage that reads.

    async def begin(self, step: Step) -> None:
        self._stage = step.stage
        await self._serve(step.observed - 1)

    async def end(self, step: Step) -> None:
        self._returned = step.index
        await self._serve(step.index - step.lookahead)

    async def close(self, *, failed: bool) -> None:
        if self._waiting and not failed:
            await self._serve(self._waiting[-1].step)
        self._waiting.clear()
        self._stage, self._returned, self.updated = "", -1, None

    async def _serve(self, last: int) -> None:
        due = [each for each in self._waiting if each.step <= last]
        if not due:
            return
        weights = due[-1].weights
        with noted(f"while syncing version {weights.version} to {name_of(self)}"):
            await self._load(weights)
            if self.scorer.version != weights.version:
                raise ProtocolError(
                    f"{name_of(self)} was given version {weights.version}, but has {self.scorer.version}"
                )
        for _ in due:
            self._waiting.popleft()
        self._served.set()


_AT_THE_CUT = "name the stages that use them in Update.after (step.weight_sync = 'cut')"


class WeightSync:
    """The synced models of a trainer, and the stages that use them; see :class:`oppo.Update`."""

    def __init__(
        self, trainer: Trainer, synced: Sequence[SyncedModel], after: Sequence[str], held: Sequence[str] = ()
    ) -> None:
        self._trainer = trainer
        self._synced = synced
        self._after = tuple(after)
        self._held = tuple(held)
        self._scorers = [each for each in synced if isinstance(each, ScorerWeights)]
        self._checked = False

    def require_possible(self, step: Step) -> None:
        if self._checked or not step.lookahead:
            return
        self.require_own_weights("with lookahead", "choose a lookahead of 0")
        for each in self._scorers:
            each.pair(self._synced)
        if not self._after:
            for model in self._synced:
                _require_in_flight(model)
        self._checked = True

    def require_own_weights(self, when: str, otherwise: str) -> None:
        if not TrainerCapabilities.of(self._trainer).trains_by_reference:
            return
        trainer = cast("SyncsByReference", self._trainer)
        if shared := [name_of(each) for each in self._synced if trainer.shares_weights(each)]:
            raise ConfigError(
                f"{when} {', '.join(shared)} works while {type(trainer).__name__} trains, and they have tensors in "
                f"common: give the trainer copies of the models, or {otherwise}"
            )

    async def settled(self) -> None:
        """Wait until the trainer's tensors may change: until none of them is read or waits to be served."""
        for each in self._synced:
            if isinstance(each, BorrowsWeights):
                await each.settled()

    @property
    def metrics(self) -> dict[str, float]:
        measured = [getattr(each, "sync_metrics", {}) for each in self._synced]
        return {name: value for metrics in measured for name, value in metrics.items()}

    async def sync(self, step: Step) -> float:
        """Give every synced model the weights once it may have them; return the seconds it took after all waits."""
        with as_itself():
            async with anyio.create_task_group() as feeding:
                for each in self._synced:
                    if isinstance(each, BorrowsWeights):
                        feeding.start_soon(self._feed, each)
                await step.previous(*self._held)
                await step.later(*self._after, *filter(None, (each.awaited(step) for each in self._scorers)))
                feeding.cancel_scope.cancel()
        start = anyio.current_time()
        for each in self._scorers:
            each.updated = step
        with step.working("update", "weight_sync"):
            await promised(self._trainer.sync_weights(*self._synced), "sync_weights() of the trainer")
        version = self._trainer.version
        if any(model.version != version for model in self._synced):
            versions = ", ".join(f"{name_of(model)} has version {model.version}" for model in self._synced)
            raise ProtocolError(f"version {version} was synced, but {versions}: the synced models disagree")
        return anyio.current_time() - start

    async def _feed(self, model: BorrowsWeights) -> None:
        # The stages waited for may need the model, and the weights that it had no longer exist.
        while True:
            await model.starved()
            with anyio.CancelScope(shield=True):  # the wait may end first: never half a load
                await self._trainer.sync_weights(cast("SyncedModel", model))


def _require_in_flight(model: SyncedModel) -> None:
    name, capabilities = name_of(model), getattr(model, "capabilities", None)
    if isinstance(capabilities, Capabilities) and capabilities.loads_while_decoding != "between decode steps":
        raise ConfigError(
            f"weights are synced in flight, and {name} cannot adopt them between decode steps, by its "
            f"capabilities.loads_while_decoding = {capabilities.loads_while_decoding!r}: {_AT_THE_CUT}"
        )
    if isinstance(model, ScorerWeights) and model.together:
        raise ConfigError(
            f"weights are synced in flight, and {name} reads with tensors that another synced model serves too, which "
            f"would change meanwhile: give it tensors of its own, or {_AT_THE_CUT}"
        )
    if hasattr(model, "extend"):
        raise ConfigError(
            f"weights are synced in flight, and {name} may be reading: sync to its stage, "
            "synced_models(policy, stage) with stage = Score(...)"
        )
