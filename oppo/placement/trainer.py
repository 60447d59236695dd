"""A trainer hosted in a place: a synchronous core there, an asynchronous handle here.

::

    HostedTrainer  ── update, write, save, restore ──>  TrainerCore      in a thread, or in another process
         │                                                   │
         └── reads ──>  counts and weights  <── writes ──────┘           in memory that both see
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import c_int64
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

from oppo.errors import ModelLost
from oppo.events import Batch
from oppo.models import ResumableTrainer, SyncsByReference, Trained, Weights
from oppo.placement.place import Hosting, Make
from oppo.placement.shared_memory import Counts


class TrainerCounts(Counts):
    """The progress of a trainer.

    Attributes:
        version: updates made.
        restored: of these, the updates before the trainer was restored.
        episodes: rollouts trained.
        micro_batches: whose backward pass is done; grows during an update.
    """

    version: int
    restored: int
    episodes: int
    micro_batches: int
    _fields_: ClassVar = [(name, c_int64) for name in ("version", "restored", "episodes", "micro_batches")]


class TrainerCore(Protocol):
    """The synchronous part of a trainer: it owns models and optimizer, and its calls are made one at a time.

    A core that is made in another process has its counts and weights in the memory of those that were made before.
    """

    @property
    def counts(self) -> TrainerCounts:
        """The progress."""

    def weights(self) -> Weights:
        """Return the current weights by reference; called where the core was created, and never during an update."""

    def update(self, batch: Batch) -> Trained:
        """Train on one batch, and count it; see :class:`oppo.models.Trainer`."""

    def write(self, directory: Path) -> None:
        """Write all that :meth:`restore` needs, and what :meth:`save` writes."""

    def save(self, directory: Path) -> None:
        """Write the trained models."""

    def restore(self, directory: Path) -> None:
        """Restore the state that ``directory`` holds, counts included."""


C = TypeVar("C", bound=TrainerCore)
R = TypeVar("R")


class HostedTrainer(SyncsByReference, ResumableTrainer, Generic[C]):
    """The trainer whose core works in ``place``; its methods raise ``ModelLost`` when the place is gone.

    A lost place is not replaced: the optimizer's state is lost with it.

    Args:
        make: makes the core where it works.

    Attributes:
        core: of this process, which shares counts and weights with the one that works.

    Raises:
        ModelError: the core cannot live there.
    """

    def __init__(self, make: Make[C], place: Hosting) -> None:
        self._hosted = place.host(make).guarded(_lost_for_good)
        self.core = self._hosted.here

    @property
    def version(self) -> int:
        return self.core.counts.version

    @property
    def has_learned(self) -> bool:
        return self.core.counts.version > self.core.counts.restored

    @property
    def progress(self) -> int:
        return self.core.counts.micro_batches

    async def update(self, batch: Batch) -> Trained:
        return await self.given("update", type(self.core).update, batch)

    async def given(self, label: str, work: Callable[[C, Batch], R], batch: Batch) -> R:
        return await self._hosted.call(label, work, _training_part(batch))

    def weights(self) -> Weights:
        return self.core.weights()

    async def write(self, directory: Path) -> None:
        await self._hosted.call("write", type(self.core).write, directory)

    async def save(self, directory: Path) -> None:
        await self._hosted.call("save", type(self.core).save, directory)

    async def restore(self, directory: Path) -> None:
        await self._hosted.call("restore", type(self.core).restore, directory)


def _training_part(batch: Batch) -> Batch:
    # A trainer needs neither the columns of prompts, which may hold objects that cannot go to another process, nor the
    # metrics, drops and deferrals of the batch.
    responses = tuple(
        replace(response, prompt=replace(response.prompt, columns={})) if response.prompt.columns else response
        for response in batch.responses
    )
    return replace(batch, responses=responses, metrics={}, dropped=(), deferred=())


@contextmanager
def _lost_for_good(call: str) -> Iterator[None]:
    del call
    try:
        yield
    except ModelLost as lost:
        lost.add_note("what was trained since the last checkpoint is lost with it: go on from there (oppo resume)")
        raise
