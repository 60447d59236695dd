"""The policy on vLLM: the actor decodes in the engine's processes, and the trainer publishes its weights to it.

::

    decoding            one request a rollout; the engine is paused between two decodings
    cut                 the engine is paused, what it had made by then is drained, and requests stay as they are
    overrun             what finished between the cut and the pause: reported first at the next decoding
    load                paused, drained, new weights, resumed: between two decode steps
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Literal, cast
from uuid import uuid4

import anyio
import anyio.to_thread
from torch import Tensor

from oppo.decodes import response_to
from oppo.errors import ProtocolError
from oppo.events import Prompt, Response
from oppo.models import Capabilities, Cut, Decode, Decoding, Sampling, Weights
from oppo.observe import Reporter
from oppo.stopping import Detokenize, StopCriteria, turn_ended
from oppo.vllm.decode import VllmDecode
from oppo.vllm.decoding import DecodingLoop
from oppo.vllm.engine import VllmEngine
from oppo.vllm.lost import answered
from oppo.vllm.requests import params_of, prompt_of, require_reported


class VllmPolicy:
    """A causal language model of vLLM as :class:`oppo.models.Policy`.

    Tokens of a rollout depend on the seed, its admission number and its sample, and, by rounding, on what is decoded
    beside it. A rollout that is carried over, or that the engine preempts, keeps its noise. One that is opened
    half-written, in a resumed run, goes on with other draws of the same distribution.

    Args:
        engine: is started, and used by one policy at a time; requests of an earlier policy are discarded.
        sampling: how tokens are drawn; ``top_p`` must be 1.
        on_publish: what happens to the keys and values of parked rollouts when weights are loaded. ``recompute``: the
            new weights read their tokens again before they continue. ``keep``: they continue with the old keys and
            values, which is cheaper but mixes versions.
        decode: returns the text of tokens; ``sampling.stop_strings`` need it. It is called on the event loop.
        limit: returns the length in tokens at which the response to a prompt ends; ``sampling.max_new_tokens`` bounds
            it, and is the default.

    Attributes:
        version: of the weights in use.
        tokens: received so far.
        reporter: tells of its work.

    Raises:
        ConfigError: ``sampling`` needs what vLLM does not report.
    """

    def __init__(
        self,
        engine: VllmEngine,
        *,
        sampling: Sampling,
        on_publish: Literal["recompute", "keep"] = "recompute",
        decode: Detokenize | None = None,
        limit: Callable[[Prompt], int] | None = None,
    ) -> None:
        require_reported(sampling)
        self.engine = engine
        self.sampling = sampling
        self._decode = decode
        self._stopping = StopCriteria(sampling, decode)
        self.version = 0
        self.tokens = 0
        self.reporter = Reporter("policy")
        self._limit = limit or (lambda prompt: engine.longest)
        self._recompute = on_publish == "recompute"
        self._nonce = uuid4().hex[:12]
        self._numbers = itertools.count()
        self._gate = anyio.Lock()
        self._paused = self._prepared = False
        self._submitted: dict[VllmDecode, None] = {}  # an ordered set: those whose requests are in the engine
        self._loop: DecodingLoop | None = None

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        return Capabilities(
            resumes="with other tokens",
            adds_while_decoding=True,
            loads_while_decoding="between decode steps",
            turns=True,
        )

    @property
    def progress(self) -> int:
        """A number that grows while it decodes."""
        return self.tokens

    def with_sampling(self, sampling: Sampling) -> VllmSampling:
        """Return a policy on the same engine, with the same weights, that draws so.

        While it decodes, the engine discards the requests of rollouts that are parked; they go on later with other
        draws, as those of a resumed run do.

        Raises:
            ConfigError: ``sampling`` needs what vLLM does not report.
        """
        require_reported(sampling)
        return VllmSampling(self, sampling, StopCriteria(sampling, self._decode))

    async def open(self, rollouts: Sequence[Prompt | Response]) -> list[VllmDecode]:
        """Return a decode for each; decoding, and the use of memory, begins with :meth:`decoding`.

        A response continues after its tokens: the model reads them, and the decode does not return them.

        Raises:
            ModelError: a prompt is empty, leaves no room for a response, or holds an id outside of the vocabulary.
        """
        return [self.opened(rollout, self.sampling, self._stopping) for rollout in rollouts]

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> list[VllmDecode]:
        """Return a decode for each whose response has turns; otherwise as :meth:`open`.

        What follows an answer is a new request, which finds the keys and values of the turn in the prefix cache.
        """
        return [self.opened(rollout, self.sampling, self._stopping, turns=True) for rollout in rollouts]

    def opened(
        self, rollout: Prompt | Response, sampling: Sampling, stopping: StopCriteria, *, turns: bool = False
    ) -> VllmDecode:
        """Return the decode of a rollout that is drawn so.

        Raises:
            ModelError: the model cannot read the prompt.
        """
        engine = self.engine
        response = response_to(rollout, engine.name, vocabulary=engine.vocabulary, longest=engine.longest)
        room = engine.longest - len(response.prompt.tokens)
        limit = min(sampling.max_new_tokens, room, self._limit(response.prompt))
        ended = turn_ended(response, stopping, limit) if turns else None
        return VllmDecode(self, response, limit, sampling, stopping, turns=turns, ended=ended)

    @asynccontextmanager
    async def decoding(self, live: Sequence[Decode], cut: Cut) -> AsyncIterator[Decoding]:
        """Decode ``live``, and what joins, while the context is open, until ``cut`` returns true.

        Raises:
            ProtocolError: a decode is of another policy, was given up or has failed; or the policy decodes already.
            ModelLost: the engine died.
            Exception: whatever else ended decoding, with a note that names the rollouts.
        """
        if self._loop is not None:
            raise ProtocolError("the policy is decoding already: leave that context before opening another")
        decodes = self.unfinished(live)
        with self.reporter.reported("decode"):
            loop = self._loop = DecodingLoop(self, decodes, cut)
            try:
                async with loop.running():
                    yield loop
            finally:
                self._loop = None

    def unfinished(self, live: Sequence[Decode]) -> list[VllmDecode]:
        """Return the decodes that have not ended.

        Raises:
            ProtocolError: a decode is of another policy, was given up or has failed.
        """
        for decode in live:
            if not isinstance(decode, VllmDecode) or not decode.usable_by(self):
                raise ProtocolError(
                    f"expected open decodes of this policy, not {decode!r}: it is foreign, given up or failed"
                )
        return [decode for decode in cast("Sequence[VllmDecode]", live) if not decode.ended]

    async def submit(self, decodes: Sequence[VllmDecode]) -> None:
        """Have the engine, which is paused, hold one request for each of these and no other.

        Raises:
            ModelLost: the engine is dead.
        """
        others = [decode for decode in self._submitted if decode not in decodes or decode.collector is None]
        await self.abort(others)
        for decode in decodes:
            if not decode.idle and not decode.request:
                await self.request(decode)

    async def request(self, decode: VllmDecode) -> None:
        """Have the engine go on with a response.

        Raises:
            ModelLost: the engine is dead.
        """
        decode.request = f"{self._nonce}-{next(self._numbers)}"
        self._submitted[decode] = None
        self.engine.requests.add(decode.request)
        prompt = prompt_of(decode, self._label(self.version))
        params = self.engine.params(params_of(decode.sampling, decode))
        async with answered(self.engine.llm, shield=True):
            decode.submitted(decode.request, await self.engine.llm.add_request(decode.request, prompt, params))

    def note_answer(self, decode: VllmDecode) -> None:
        """Have a decode whose turn was answered join the others, or end."""
        if self._loop is not None:
            self._loop.note_answer(decode)

    async def abort(self, decodes: Sequence[VllmDecode]) -> None:
        """Discard the requests of decodes; a dead engine has none."""
        ids = [decode.request for decode in decodes if decode.request]
        for decode in decodes:
            self.forget(decode)
        if ids and not self.engine.llm.errored:
            async with answered(self.engine.llm, shield=True):
                await self.engine.llm.abort(ids)

    def forget(self, decode: VllmDecode) -> None:
        """Note that the engine has no request for a decode."""
        self.engine.requests.discard(decode.request)
        decode.request, decode.collector = "", None
        self._submitted.pop(decode, None)

    async def prepare(self) -> None:
        """Pause the engine; before its first use, discard what an earlier policy has left in it.

        Raises:
            ModelLost: the engine is dead.
        """
        async with self._gate:
            await self._pause()
            if self._prepared:
                return
            async with answered(self.engine.llm, shield=True):
                if left := sorted(self.engine.requests):
                    self.engine.requests.clear()
                    await self.engine.llm.abort(left)
                await self.engine.llm.update_weight_version(self._label(self.version))
            self._prepared = True

    async def pause(self) -> None:
        """Stop the engine between two decode steps, and drain what it made; it may be paused already.

        Raises:
            ModelLost: the engine is dead.
        """
        async with self._gate:
            await self._pause()

    async def resume(self) -> None:
        """Let the engine go on, unless decoding has ended meanwhile.

        Raises:
            ModelLost: the engine is dead.
        """
        async with self._gate:
            await self._resume()

    async def _pause(self) -> None:
        if not self._paused:
            async with answered(self.engine.llm, shield=True):
                await self.engine.llm.pause_generation(mode="keep", clear_cache=False)
            self._paused = True
        if self._loop is not None:
            self._loop.drain()

    async def _resume(self) -> None:
        if self._paused and self._loop is not None and self._loop.wants_tokens and not self.engine.llm.errored:
            async with answered(self.engine.llm, shield=True):
                await self.engine.llm.resume_generation()
            self._paused = False

    async def load(self, weights: Weights) -> None:
        """Serve the actor's weights from the next decode step on, those of adapters merged; the engine is paused.

        An empty ``weights.actor`` changes the version only: the actor was not trained.

        Raises:
            ModelError: the weights could not be sent; the old ones are served.
            ModelLost: it is not known which weights are served, or the engine is dead.
        """
        await self.prepare()
        with self.reporter.reported("load"):
            async with self._gate:
                await self._pause()
                try:
                    await self._send(weights)
                finally:
                    await self._resume()

    async def _send(self, weights: Weights) -> None:
        llm = self.engine.llm
        async with answered(llm):
            if weights.actor:
                tensors = await anyio.to_thread.run_sync(weights.standalone) if weights.merge else weights.actor
                await self.engine.sender.send(llm, cast("Mapping[str, Tensor]", tensors), self._label(weights.version))
            else:
                await llm.update_weight_version(self._label(weights.version))
            self.version = weights.version
            if weights.actor and self._recompute:
                await llm.reset_prefix_cache(reset_running_requests=True)

    def _label(self, version: int) -> str:
        return f"{self._nonce}-{version}"

    def number_of(self, label: str) -> int | None:
        """Return the version with this label; ``None`` for a label of another policy."""
        nonce, _, number = label.rpartition("-")
        return int(number) if nonce == self._nonce and number.isdecimal() else None


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
        """What it can do."""
        return self._policy.capabilities

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
