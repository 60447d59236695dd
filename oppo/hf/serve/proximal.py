"""The proximal log-probs of stale tokens: what the actor, as it is before the update, gives to what it once sampled."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import anyio
import numpy as np
from transformers import PreTrainedModel

from oppo.events import BoolArray, Chunk, Finish, FloatArray, Given, Prompt, Response
from oppo.hf.serve.scorer_workers import ReferenceWorker
from oppo.hf.serve.scorers import ReferenceLogprobs
from oppo.models import Sampling, Weights
from oppo.placement import Hosting
from oppo.scheduling import IN_ORDER, Priority


class ProximalLogprobs(ReferenceLogprobs):
    """Scores each response token with its log-prob under the actor's present weights: float32 [n], natural logarithm.

    A token that these weights sampled keeps the log-prob that was recorded then. So only rollouts with older tokens are
    read, whole and once, when they have finished; where nothing was carried over, the model is never called, and what
    is returned is, to the bit, the behaviour's log-probs. They are over the tokens' supports, and agree with the
    recorded ones of the same weights as :class:`~oppo.hf.serve.scorers.ReferenceLogprobs` do.

    Args:
        model: the actor. It may be the very module that decodes: nothing of it is changed here.
        sampling: its temperature is the policy's.
        thread: where rollouts are read: any place.
        exact: the results do not depend, to the bit, on which rollouts finish together; slower.
        on_publish: what the policy does with the keys and values of parked rollouts. Where it keeps them, tokens after
            older ones were sampled by no version alone: they are computed again too.

    Raises:
        ModelRefused: the model cannot be served row by row.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sampling: Sampling,
        thread: Hosting,
        exact: bool = False,
        on_publish: Literal["recompute", "keep"] = "recompute",
    ) -> None:
        super().__init__(model, sampling=sampling, thread=thread, exact=exact)
        self._mixed = on_publish == "keep"
        self._version = 0

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._version

    async def load(self, weights: Weights) -> None:
        """Serve ``weights.actor`` from the next call on; tensors that are the model's own are not copied.

        Raises:
            ModelError: a name is missing or unknown, or a shape differs; the old weights are then still served.
        """
        await self._worker.call_local("load", self._load, weights)

    async def extend(self, events: Sequence[Prompt | Chunk | Given], *, priority: Priority = IN_ORDER) -> None:
        """Read nothing: which tokens are stale is known at the end."""

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[FloatArray]:
        """Return the log-probs of each response."""
        stale = {event.rollout: self._stale(event.response) for event in finished}
        again = [event for event in finished if stale[event.rollout].any()]
        read = dict(zip((event.rollout for event in again), await self._read(again, priority), strict=True))
        return [
            np.where(stale[event.rollout], read[event.rollout], event.response.logprobs)
            if event.rollout in read
            else event.response.logprobs
            for event in finished
        ]

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        """Hold nothing of rollouts between two calls."""

    def _load(self, worker: ReferenceWorker, weights: Weights) -> None:
        if weights.actor:
            worker.load(weights.actor)
        self._version = weights.version

    def _stale(self, response: Response) -> BoolArray:
        """Return which tokens are not of the present weights alone: bool [n]."""
        older = response.versions < self._version
        return response.sampled & (np.logical_or.accumulate(older) if self._mixed else older)

    async def _read(self, finished: Sequence[Finish], priority: Priority) -> Sequence[FloatArray]:
        if not finished:
            return []
        try:
            parts = [part for each in finished for part in (each.response.prompt, each.response.chunk())]
            await super().extend(parts, priority=priority)
            return await super().finish(finished, priority=priority)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await super().forget([event.rollout for event in finished], priority=priority)
            raise
