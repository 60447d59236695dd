"""Proximal log-probs: those of response tokens under the actor's weights before the update.

Where the trainer's backend also decodes, a token of the current weights has been scored already, and only stale ones
are recomputed (:class:`ProximalLogprobs`). Another engine's log-probs differ by its kernels and its precision, so all
are recomputed (:class:`RecomputedLogprobs`): the mismatch that corrections see then holds both staleness and engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import anyio
import numpy as np
from transformers import PreTrainedModel

from oppo.events import BoolArray, Chunk, Finish, FloatArray, Given, Prompt, Response
from oppo.hf.serve.scorers import ReferenceLogprobs
from oppo.models import Sampling, Weights
from oppo.placement import Hosting
from oppo.scheduling import IN_ORDER, Priority


class RecomputedLogprobs(ReferenceLogprobs):
    """Scores each response token with its log-prob under the actor's current weights: float32 [n], natural logarithm.

    It reads responses while they grow, as the reference does. It follows the trainer: after :meth:`load`, sessions
    opened under an older version are stale, and the caller forgets and replays them.

    Args:
        model: the actor. It may be the module that is trained: nothing of it is changed here.
        sampling: the policy's; only the temperature and the ids that may be drawn count.
        thread: where rollouts are read: any place.
        exact: the bits of results do not depend on arrival patterns and other rollouts; slower.

    Raises:
        ModelRefused: the model cannot be served row by row.
    """

    async def load(self, weights: Weights) -> None:
        """Serve ``weights.actor`` from the next call on; tensors that are the model's own are not copied.

        An empty ``weights.actor`` changes the version only.

        Raises:
            ModelError: a name is missing or unknown, or a shape differs; the old weights are then still served.
        """
        await self._follow(weights.actor, weights.version)


class ProximalLogprobs(RecomputedLogprobs):
    """Scores each response token with its log-prob under the actor's current weights: float32 [n], natural logarithm.

    A token that these weights sampled keeps its recorded log-prob. So the model reads only rollouts with older tokens,
    whole and once, when they finish. Where no rollout was carried over it reads nothing, and the result is, to the bit,
    the behaviour log-probs. Log-probs are over the tokens' supports; recomputed ones agree with recorded ones of the
    same weights as those of :class:`~oppo.hf.serve.scorers.ReferenceLogprobs` do.

    Args:
        model: the actor. It may be the module that decodes: nothing of it is changed here.
        sampling: the policy's; only the temperature and the ids that may be drawn count.
        thread: where rollouts are read: any place.
        exact: the bits of results do not depend on which rollouts finish together; slower.
        on_publish: what the policy does with the keys and values of parked rollouts. With ``keep``, no single version
            sampled the tokens that follow older ones, so they are recomputed too.

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

    async def extend(self, events: Sequence[Prompt | Chunk | Given], *, priority: Priority = IN_ORDER) -> None:
        """Read nothing: which tokens are stale is known when a rollout finishes."""

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[FloatArray]:
        """Return the log-probs of each response."""
        stale = {event.rollout: self._stale(event.response) for event in finished}
        carried = [event for event in finished if stale[event.rollout].any()]
        logprobs = {event.rollout: event.response.logprobs for event in finished}
        for event, recomputed in zip(carried, await self._recompute(carried, priority), strict=True):
            logprobs[event.rollout] = np.where(stale[event.rollout], recomputed, event.response.logprobs)
        return list(logprobs.values())

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        """Do nothing: no rollout is kept between two calls."""

    def _stale(self, response: Response) -> BoolArray:
        """Return which tokens the current weights alone did not sample: bool [n]."""
        older = response.versions < self._version
        return response.sampled & (np.logical_or.accumulate(older) if self._mixed else older)

    async def _recompute(self, finished: Sequence[Finish], priority: Priority) -> Sequence[FloatArray]:
        if not finished:
            return []
        try:
            events = [event for each in finished for event in (each.response.prompt, each.response.chunk())]
            await super().extend(events, priority=priority)
            return await super().finish(finished, priority=priority)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await super().forget([event.rollout for event in finished], priority=priority)
            raise
