"""What a follower may be beside a :class:`oppo.models.Follower`; each is found by its members."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from oppo.models import Follower, Weights


@runtime_checkable
class ServesByReference(Protocol):
    """A follower that may serve the very tensors that are trained, so that an update changes what it serves."""

    def serves(self, weights: Weights) -> bool:
        """Return whether a tensor of ``weights`` is one that it serves."""


@runtime_checkable
class ServesTensors(Protocol):
    """A follower that knows its tensors, since another follower may serve the very same."""

    def tensors(self) -> frozenset[int]:
        """Return the addresses of the tensors that new weights change."""


def share_tensors(one: Follower, other: Follower) -> bool:
    """Return whether two followers serve a tensor together, so that new weights of one are those of the other."""
    return isinstance(one, ServesTensors) and isinstance(other, ServesTensors) and bool(one.tensors() & other.tensors())


@runtime_checkable
class CopiesWeights(Protocol):
    """A follower that can copy weights which it will serve later, when the trainer's own have changed."""

    async def copied(self, weights: Weights) -> Weights:
        """Return what it serves of these weights, in memory of its own."""


@runtime_checkable
class StandsFor(Protocol):
    """A follower in the place of a model, to which it passes the weights on."""

    @property
    def stands_for(self) -> Follower:
        """The model."""


def name_of(follower: Follower) -> str:
    """Return the name of a follower's class, or of the model's that it stands for."""
    return type(follower.stands_for if isinstance(follower, StandsFor) else follower).__name__
