"""The calls of vLLM that the policy uses, as protocols that ``AsyncLLM`` and the fake of the tests fit; its death."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any, Final, Protocol

import anyio

from oppo.errors import ModelLost, OppoError, as_itself, one_line


class Logprob(Protocol):
    """vLLM's ``Logprob``."""

    @property
    def logprob(self) -> float:
        """Natural logarithm of the probability."""


class WeightVersionSpan(Protocol):
    """vLLM's span of tokens that one version of the weights made."""

    @property
    def version(self) -> str:
        """The version, as it was synced."""

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
            the index of its first token, and ``routed_experts_chunks`` what each decode step has given of its experts.
    """

    output_processor: Any

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""

    async def add_request(self, request_id: str, prompt: Any, params: Any, *, lora_request: Any = None) -> Collector:
        """Submit a request, with an adapter; a paused engine holds it."""

    async def add_lora(self, lora_request: Any) -> bool:
        """Load an adapter, maybe in the place of another one, for requests in progress too."""

    async def abort(self, request_id: Sequence[str]) -> None:
        """Discard requests; those that are over are ignored."""

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        """Stop between two decode steps; with ``keep`` requests stay as they are."""

    async def resume_generation(self) -> None:
        """Go on."""

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget the KV cache; requests compute theirs again."""

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


GRACE: Final = 20.0
"""Seconds for which a cancellation waits while an engine takes weights."""

LOOK: Final = 0.1
"""Seconds between two looks at whether an engine is dead that owes an answer."""


class ReportsDeath(Protocol):
    """vLLM's ``AsyncLLM``, as far as it reports its death."""

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""


class StartedEngine(Protocol):
    """A started engine: :class:`oppo.vllm.engine.Engine`."""

    @property
    def llm(self) -> ReportsDeath:
        """Its ``AsyncLLM``, or what stands for it."""

    @property
    def advice(self) -> str:
        """What to do when it is lost."""

    def require_usable(self) -> None:
        """Raise ``ProtocolError`` unless its calls may be made here and now."""


@contextmanager
def engine_calls(engine: StartedEngine) -> Iterator[None]:
    """Turn whatever a call of the engine raises into :class:`~oppo.errors.ModelLost`, with what to do."""
    try:
        yield
    except OppoError:
        raise
    except Exception as error:
        raise ModelLost(
            f"vLLM has failed, and its rollouts are lost with it ({one_line(error)}): {engine.advice}"
        ) from error


@asynccontextmanager
async def answered(engine: StartedEngine, *, shield: bool = False) -> AsyncIterator[None]:
    """Give up the body, calls of the engine, when the engine dies: it would never answer them.

    ``shield``: a cancellation from outside waits for the end of the body.
    """
    engine.require_usable()
    died = False

    async def watch() -> None:
        nonlocal died
        while not engine.llm.errored:  # noqa: ASYNC110 - nothing announces it
            await anyio.sleep(LOOK)
        died = True
        calls.cancel_scope.cancel()

    with engine_calls(engine), as_itself(), anyio.CancelScope(shield=shield):
        async with anyio.create_task_group() as calls:
            calls.start_soon(watch, name="watch for the engine's death")
            yield
            calls.cancel_scope.cancel()
    if died:
        raise ModelLost(f"vLLM has died, and its rollouts are lost with it: {engine.advice}")


@asynccontextmanager
async def cancelled_after(seconds: float) -> AsyncIterator[None]:
    """Give the body so many more seconds when it is cancelled from outside."""

    async def outside() -> None:
        try:
            await anyio.sleep_forever()
        finally:
            body.deadline = min(body.deadline, anyio.current_time() + seconds)

    with as_itself():
        async with anyio.create_task_group() as tasks:
            with anyio.CancelScope(shield=True) as body:
                tasks.start_soon(outside, name="watch for a cancellation")
                yield
            tasks.cancel_scope.cancel()
