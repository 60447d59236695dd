"""The calls of vLLM that the policy uses: protocols that ``AsyncLLM`` and the fake of the tests both fit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Logprob(Protocol):
    """vLLM's ``Logprob``."""

    @property
    def logprob(self) -> float:
        """Natural logarithm of the probability."""


class WeightVersionSpan(Protocol):
    """vLLM's span of tokens that one version of the weights made."""

    @property
    def version(self) -> str:
        """The version, as it was published."""

    @property
    def start(self) -> int:
        """Index of the first output token."""

    @property
    def end(self) -> int:
        """Index after the last one."""


class Completion(Protocol):
    """vLLM's ``CompletionOutput``: what is new of one request."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The new tokens."""

    @property
    def logprobs(self) -> Sequence[Mapping[int, Logprob]] | None:
        """Of each new token: log-probs by token id, its own among them."""

    @property
    def finish_reason(self) -> str | None:
        """``stop``, ``length``, or what else ended it; ``None`` while it goes on."""


class Output(Protocol):
    """vLLM's ``RequestOutput``."""

    @property
    def outputs(self) -> Sequence[Completion]:
        """One completion."""


class Collector(Protocol):
    """vLLM's ``RequestOutputCollector``: holds what is new of a request until it is taken.

    Attributes:
        request_id: the engine's own id of the request.
    """

    request_id: str

    def get_nowait(self) -> Output | None:
        """Take what is there."""

    async def get(self) -> Output:
        """Wait for something, and take it; safe to cancel."""


class AsyncEngine(Protocol):
    """vLLM's ``AsyncLLM``.

    Attributes:
        output_processor: vLLM's ``OutputProcessor``, whose ``request_states`` holds, by the engine's own ids, the
            requests that have not ended; ``weight_version_starts`` of one has the versions behind its tokens, each with
            the index of its first token.
    """

    output_processor: Any

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""

    async def add_request(self, request_id: str, prompt: Any, params: Any) -> Collector:
        """Submit a request; a paused engine holds it."""

    async def abort(self, request_id: Sequence[str]) -> None:
        """Discard requests; those that are over are ignored."""

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Stop between two decode steps; with ``keep`` requests stay as they are."""

    async def resume_generation(self) -> None:
        """Go on."""

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget keys and values; requests compute theirs again."""

    async def init_weight_transfer_engine(self, request: Any) -> None:
        """Agree with the workers on how weights travel."""

    async def start_weight_update(self) -> None:
        """Begin an update of the weights."""

    async def update_weights(self, request: Any) -> None:
        """Load weights."""

    async def finish_weight_update(self, weight_version: str | None = None) -> None:
        """End the update; later tokens are of this version."""

    async def update_weight_version(self, new_version: str) -> None:
        """Name the version of the weights that are served."""
