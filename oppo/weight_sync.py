"""Weight sync: the weights that a trainer holds, given to the models that serve them.

The optional abilities of a :class:`oppo.models.SyncedModel` are found by its members:
:class:`ServesByReference`, :class:`CopiesWeights` and :class:`BorrowsWeights`. One that stands for another has that
as ``stands_for``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import anyio

from oppo.models import SyncedModel, TrainerCapabilities, Weights


@runtime_checkable
class ServesByReference(Protocol):
    """A synced model that may serve the very tensors that are trained, so that an update changes its weights."""

    def serves(self, weights: Weights) -> bool:
        """Return whether a tensor of ``weights`` is one that it serves."""

    def tensors(self) -> frozenset[int]:
        """Return the addresses of the tensors that new weights change; another model may serve the very same."""


@runtime_checkable
class CopiesWeights(Protocol):
    """A synced model that can copy weights which it will serve later, when the trainer's own have changed."""

    async def copied(self, weights: Weights) -> Weights:
        """Return a copy of the weights that it serves of these, in memory of its own."""


@runtime_checkable
class BorrowsWeights(Protocol):
    """A synced model that may go on to read the trainer's own tensors when it has loaded them."""

    async def settled(self) -> None:
        """Wait until it reads none of the trainer's tensors; it reads none until the next load, so they may change."""

    async def starved(self) -> None:
        """Return once it serves nothing until the next load, so that waiting for its output would never end."""


def model_behind(model: SyncedModel) -> SyncedModel:
    """Return the model to which a synced model passes weights on as its ``stands_for``; mostly itself."""
    behind: SyncedModel = getattr(model, "stands_for", model)
    return behind


def name_of(model: SyncedModel) -> str:
    """Return the name of a synced model's class, or of the one it stands for."""
    return type(model_behind(model)).__name__


def share_tensors(one: SyncedModel, other: SyncedModel) -> bool:
    """Return whether two models serve a tensor together, so that they get new weights together."""
    return (
        isinstance(one, ServesByReference)
        and isinstance(other, ServesByReference)
        and bool(one.tensors() & other.tensors())
    )


class SyncsByReference(ABC):
    """The part of a trainer that gives its weights by reference."""

    @property
    def capabilities(self) -> TrainerCapabilities:
        """It may train the very tensors that a synced model serves."""
        return TrainerCapabilities(trains_by_reference=True)

    @abstractmethod
    def weights(self) -> Weights:
        """Return the current weights by reference; never called during an update."""

    async def sync_weights(self, *synced: SyncedModel) -> None:
        """Give the current weights to each synced model with :func:`sync`; never half cancelled."""
        with anyio.CancelScope(shield=True):
            await sync(self.weights(), synced)
        await anyio.lowlevel.checkpoint_if_cancelled()

    def shares_weights(self, model: SyncedModel) -> bool:
        return isinstance(model, ServesByReference) and model.serves(self.weights())


async def sync(weights: Weights, synced: Sequence[SyncedModel]) -> None:
    """Give ``weights`` to each synced model, one after the other.

    A failure is final: the old weights no longer exist, and a model may share the storage of the new ones. A note says
    the version of each; the run ends, and resumes from a checkpoint.
    """
    for model in synced:
        try:
            await model.load(weights)
        except Exception as error:
            held = ", ".join(f"{name_of(one)} has version {one.version}" for one in synced)
            error.add_note(f"while syncing version {weights.version}: {held}; do not go on from here")
            raise
