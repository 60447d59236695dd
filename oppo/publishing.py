"""Publishing: the weights that a trainer holds, given to the models that follow them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import anyio

from oppo.follower_protocols import ServesByReference, name_of
from oppo.models import Follower, Weights


class Publisher(ABC):
    """The part of a trainer that publishes its weights by reference."""

    @abstractmethod
    def weights(self) -> Weights:
        """Return the current weights by reference; never called during an update."""

    async def publish(self, *followers: Follower) -> None:
        """Give the current weights to each follower with :func:`publish`; never half cancelled."""
        with anyio.CancelScope(shield=True):
            await publish(self.weights(), followers)
        await anyio.lowlevel.checkpoint_if_cancelled()

    def shares_weights(self, follower: Follower) -> bool:
        """Return whether ``follower`` serves the very tensors that are trained."""
        return isinstance(follower, ServesByReference) and follower.serves(self.weights())


async def publish(weights: Weights, followers: Sequence[Follower]) -> None:
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
