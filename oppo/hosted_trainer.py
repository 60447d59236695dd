"""A trainer that works in a place: a synchronous core there, an asynchronous handle here.

::

    HostedTrainer  ── update, write, save, restore ──>  TrainerCore      in a thread, or in another process
         │                                                   │
         └── reads ──>  counts and weights  <── writes ──────┘           in memory that both see
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import Structure, c_int64, sizeof
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Generic, Protocol, TypeVar

import anyio

from oppo.errors import ModelLost
from oppo.events import Batch
from oppo.models import Follower, Trained, Weights
from oppo.placement import Hosting
from oppo.placement.block import Block


class TrainerCounts(Structure):
    """How far a trainer is, as whole numbers in memory that every process sees to which this is sent.

    Attributes:
        version: updates made.
        restored: how many of them were made before the trainer was restored.
        episodes: rollouts trained.
        micro_batches: how many have been read and taken back; it grows while an update goes on.
        block: the memory.
    """

    version: int
    restored: int
    episodes: int
    micro_batches: int
    _fields_: ClassVar = [(name, c_int64) for name in ("version", "restored", "episodes", "micro_batches")]
    block: Block

    @classmethod
    def new(cls) -> TrainerCounts:
        """Return counts that are all 0.

        Raises:
            OSError: there is no memory.
        """
        return cls.over(Block.new(sizeof(cls)))

    @classmethod
    def over(cls, block: Block) -> TrainerCounts:
        """Return the counts that lie in ``block``."""
        counts = cls.from_buffer(block)
        counts.block = block
        return counts

    def __reduce__(self) -> tuple[Callable[[Block], TrainerCounts], tuple[Block]]:
        """Cross to another process as the memory in which they lie."""
        return TrainerCounts.over, (self.block,)


class TrainerCore(Protocol):
    """What a trainer is where it works: it owns models and optimizer, and does one thing at a time.

    For another process it can be pickled; counts and weights of what is unpickled there lie in the same memory.
    """

    @property
    def counts(self) -> TrainerCounts:
        """How far it is."""

    def weights(self) -> Weights:
        """Return the current weights by reference; called where the core was made, and never during an update."""

    def update(self, batch: Batch) -> Trained:
        """Train on one batch, and count it; see :class:`oppo.models.Trainer`."""

    def write(self, directory: Path) -> None:
        """Write all that :meth:`restore` needs, and what :meth:`save` does."""

    def save(self, directory: Path) -> None:
        """Write what is trained."""

    def restore(self, directory: Path) -> None:
        """Go on where the core that wrote ``directory`` was, counts included."""


C = TypeVar("C", bound=TrainerCore)


class HostedTrainer(Generic[C]):
    """The trainer whose core works in ``place``; implements :class:`oppo.models.ResumableTrainer`.

    A place that is lost is not replaced: the optimizer's state is lost with it.

    Args:
        core: does the work.
        place: where it lives from now on.

    Attributes:
        core: as this process sees it: its counts and its weights are those of where it lives.

    Raises:
        ModelError: the core cannot live there.
    """

    def __init__(self, core: C, place: Hosting) -> None:
        self.core = core
        self._hosted = place.host(core)

    @property
    def version(self) -> int:
        """The number of updates made so far."""
        return self.core.counts.version

    @property
    def has_learned(self) -> bool:
        """Whether an update was made since the trainer was made, or restored."""
        return self.core.counts.version > self.core.counts.restored

    @property
    def progress(self) -> int:
        """How many micro-batches have been read and taken back; it grows while an update goes on."""
        return self.core.counts.micro_batches

    async def update(self, batch: Batch) -> Trained:
        """Train on one batch; the version then is one more, even if every minibatch was skipped.

        Raises:
            ModelLost: the place is gone.
            Exception: whatever the core raised.
        """
        with _lost_for_good():
            return await self._hosted.call("update", type(self.core).update, read_of(batch))

    async def publish(self, *followers: Follower) -> None:
        """Give the current weights to each follower, by reference and one after the other; never half cancelled.

        See :func:`publish`.
        """
        with anyio.CancelScope(shield=True):
            await publish(self.core.weights(), followers)
        await anyio.lowlevel.checkpoint_if_cancelled()

    async def write(self, directory: Path) -> None:
        """Write all that :meth:`restore` needs, and what is trained.

        Raises:
            OSError: it could not be written.
            ModelLost: the place is gone.
        """
        with _lost_for_good():
            await self._hosted.call("write", type(self.core).write, directory)

    async def save(self, directory: Path) -> None:
        """Write what is trained.

        Raises:
            OSError: it could not be written.
            ModelLost: the place is gone.
        """
        with _lost_for_good():
            await self._hosted.call("save", type(self.core).save, directory)

    async def restore(self, directory: Path) -> None:
        """Go on where the trainer that wrote ``directory`` was; followers know when :meth:`publish` tells them.

        Raises:
            CheckpointError: it was written of other models.
            ModelLost: the place is gone.
        """
        with _lost_for_good():
            await self._hosted.call("restore", type(self.core).restore, directory)


async def publish(weights: Weights, followers: Sequence[Follower]) -> None:
    """Give ``weights`` to each follower, one after the other.

    There is no way back from a failure: the old weights no longer exist, and a follower may share the storage of the
    new ones. So a failure says which followers have which version, and ends the run; a checkpoint is the way on.

    Raises:
        Exception: whatever a follower raised.
    """
    for follower in followers:
        try:
            await follower.load(weights)
        except Exception as error:
            held = ", ".join(f"{type(one).__name__} has version {one.version}" for one in followers)
            error.add_note(f"while publishing version {weights.version}: {held}; do not go on from here")
            raise


def read_of(batch: Batch) -> Batch:
    """Return what a trainer reads of a batch: no columns of the data, and of no rollouts but those that are trained.

    A column may hold anything, also what cannot go to another process.
    """
    responses = tuple(
        replace(response, prompt=replace(response.prompt, columns={})) if response.prompt.columns else response
        for response in batch.responses
    )
    return replace(batch, responses=responses, metrics={}, dropped=(), deferred=())


@contextmanager
def _lost_for_good() -> Iterator[None]:
    try:
        yield
    except ModelLost as lost:
        lost.add_note("what was trained since the last checkpoint is lost with it: go on from there (oppo resume)")
        raise
