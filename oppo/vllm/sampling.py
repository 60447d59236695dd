"""A policy on vLLM that draws in another way: on the same engine, with the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from oppo.events import Prompt, Response
from oppo.models import Capabilities, Cut, Decode, Decoding, Sampling, Weights
from oppo.stopping import StopCriteria
from oppo.vllm.requests import reports_supports

if TYPE_CHECKING:
    from oppo.vllm.requests import VllmDecode
    from oppo.vllm.policy import VllmPolicy


class VllmSampling:
    """A :class:`VllmPolicy` that draws in another way; made by its ``with_sampling``."""

    def __init__(self, policy: VllmPolicy, sampling: Sampling, stopping: StopCriteria) -> None:
        self._policy = policy
        self._sampling = sampling
        self._stopping = stopping

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._policy.version

    @property
    def capabilities(self) -> Capabilities:
        """The policy's capabilities under this sampling."""
        return replace(self._policy.capabilities, supports=reports_supports(self._sampling))

    async def load(self, weights: Weights) -> None:
        """Serve other weights, in the policy that it is of too."""
        await self._policy.load(weights)

    async def open(self, rollouts: Sequence[Prompt | Response]) -> list[VllmDecode]:
        """Return a decode for each, as :meth:`VllmPolicy.open` does."""
        return [self._policy.opened(rollout, self._sampling, self._stopping) for rollout in rollouts]

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> list[VllmDecode]:
        """Return a decode for each whose response has turns, as :meth:`VllmPolicy.open_turns` does."""
        return [self._policy.opened(rollout, self._sampling, self._stopping, turns=True) for rollout in rollouts]

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        """Decode while the context is open, as :meth:`VllmPolicy.decoding` does."""
        return self._policy.decoding(live, cut)
