"""Weight sync: the weights that a trainer holds, given to the models that serve them.

What a model knows of its tensors, beside being a :class:`oppo.models.Follower`, is found by its members:
:class:`ServesByReference` and :class:`CopiesWeights`. One that stands for another has that as ``stands_for``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import anyio

from oppo.models import Follower, TrainerCapabilities, Weights


@runtime_checkable
class ServesByReference(Protocol):
    """A synced model that may serve the very tensors that are trained, so that an update changes what it serves."""

    def serves(self, weights: Weights) -> bool:
        """Return whether a tensor of ``weights`` is one that it serves."""

    def tensors(self) -> frozenset[int]:
        """Return the addresses of the tensors that new weights change; another model may serve the very same."""


@runtime_checkable
class CopiesWeights(Protocol):
    """A synced model that can copy weights which it will serve later, when the trainer's own have changed."""

    async def copied(self, weights: Weights) -> Weights:
        """Return what it serves of these weights, in memory of its own."""


def model_behind(follower: Follower) -> Follower:
    """Return the model to which a follower passes weights on as its ``stands_for``; mostly itself."""
    model: Follower = getattr(follower, "stands_for", follower)
    return model


def name_of(follower: Follower) -> str:
    """Return the name of a follower's class, or of the model's that it stands for."""
    return type(model_behind(follower)).__name__


def share_tensors(one: Follower, other: Follower) -> bool:
    """Return whether two models serve a tensor together, so that new weights of one are those of the other."""
    return (
        isinstance(one, ServesByReference)
        and isinstance(other, ServesByReference)
        and bool(one.tensors() & other.tensors())
    )


class SyncsByReference(ABC):
    """The part of a trainer that gives its weights by reference."""

    @property
    def capabilities(self) -> TrainerCapabilities:
        """It may train the very tensors that a follower serves."""
        return TrainerCapabilities(trains_by_reference=True)

    @abstractmethod
    def weights(self) -> Weights:
        """Return the current weights by reference; never called during an update."""

    async def publish(self, *followers: Follower) -> None:
        """Give the current weights to each follower with :func:`sync`; never half cancelled."""
        with anyio.CancelScope(shield=True):
            await sync(self.weights(), followers)
        await anyio.lowlevel.checkpoint_if_cancelled()

    def shares_weights(self, follower: Follower) -> bool:
        """Return whether ``follower`` serves the very tensors that are trained."""
        return isinstance(follower, ServesByReference) and follower.serves(self.weights())


async def sync(weights: Weights, followers: Sequence[Follower]) -> None:
    """Give ``weights`` to each follower, one after the other.

    A failure is final: the old weights no longer exist, and a follower may share the storage of the new ones. Its note
    holds each follower's version; the run ends, and resumes from a checkpoint.

    Raises:
        Exception: whatever a follower raised.
    """
    for follower in followers:
        try:
            await follower.load(weights)
        except Exception as error:
            held = ", ".join(f"{name_of(one)} has version {one.version}" for one in followers)
            error.add_note(f"while publishing version {weights.version}: {held}; do not go on from here")
            raise
