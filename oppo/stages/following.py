"""The weights of a scorer that follows the trainer, as its stage takes them."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

import anyio

from oppo.models import Follower, ServesByReference, Weights


class Following:
    """A scorer that follows the trainer: its weights change only while its stage neither reads nor scores.

    Args:
        scorer: the model behind a :class:`~oppo.stages.Score`.
    """

    def __init__(self, scorer: Follower) -> None:
        self.scorer = scorer
        self._turn = anyio.Lock(fast_acquire=True)

    @property
    def stands_for(self) -> Follower:
        """The scorer."""
        return self.scorer

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self.scorer.version

    def reading(self) -> AbstractAsyncContextManager[object]:
        """Return a context in which the weights stay as they are: from what is accepted until it is read or scored."""
        return self._turn

    async def load(self, weights: Weights) -> None:
        """Serve these weights, once nothing is being read."""
        async with self._turn:
            await self.scorer.load(weights)

    def serves(self, weights: Weights) -> bool:
        """Return whether a tensor of ``weights`` is one that the scorer serves."""
        return isinstance(self.scorer, ServesByReference) and self.scorer.serves(weights)
