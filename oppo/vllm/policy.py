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
from contextlib import asynccontextmanager
from typing import Literal, cast
from uuid import uuid4

import anyio
import anyio.to_thread
from torch import Tensor

from oppo.decodes import BufferedDecode, response_to
from oppo.errors import ProtocolError
from oppo.events import FinishReason, Prompt, Response
from oppo.models import Capabilities, Cut, Decode, Decoding, FixedDecoding, Sampling, Weights
from oppo.observe import Reporter
from oppo.stopping import Detokenize, StopCriteria
from oppo.support import Support
from oppo.vllm.decoding import DecodingLoop
from oppo.vllm.engine import VllmEngine
from oppo.vllm.lost import answered
from oppo.vllm.requests import drawn, params_of, prompt_of, require_reported
from oppo.vllm.surface import Collector, Output


class VllmDecode(BufferedDecode):
    """One rollout of a :class:`VllmPolicy`.

    Attributes:
        request: id of its request in the engine; empty when there is none.
        collector: receives the engine's outputs for the request.
    """

    def __init__(self, policy: VllmPolicy, response: Response, limit: int) -> None:
        super().__init__(response, limit)
        self.request = ""
        self.collector: Collector | None = None
        self._policy = policy
        self._tokens = response.tokens.tolist()
        self._versions: list[int] = []
        self._last: list[tuple[int, float, Support]] = []
        self._reason: FinishReason | None = None

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of admission order: admission number and sample."""
        return self.prompt.admission, self.prompt.sample

    @property
    def sequence(self) -> list[int]:
        """Prompt and response so far."""
        return [*self.prompt.tokens.tolist(), *self._tokens]

    @property
    def written(self) -> int:
        """Length of the response in tokens, those included that may not be read yet."""
        return len(self._tokens)

    @property
    def finished(self) -> bool:
        """Whether the engine has ended the response, whether that may be known or not."""
        return self._reason is not None

    @property
    def withheld(self) -> bool:
        """Whether the response has ended, and its end has not been reported."""
        return self.finished and not self.ended

    def take(self, output: Output, version: int) -> None:
        """Take what is new of the request; of a response that ends, all of it is withheld until :meth:`release`.

        Raises:
            ModelError: a log-prob is not finite, or the engine ended the request for a reason of its own.
            ProtocolError: the engine says that other weights made a token.
        """
        (completion,) = output.outputs
        fresh = drawn(completion, self._policy.sampling, self.written)
        for count, (token, _, _) in enumerate(fresh, 1):
            self._tokens.append(token)
            self._versions.append(version)
            self._reason = self._policy.stopping.reason(self._tokens, self.limit)
            if self.finished:
                fresh = fresh[:count]
                break
        if completion.finish_reason is not None:
            self._require_versions(completion)
            if not self.finished:
                raise ProtocolError(
                    f"vLLM ended rollout {self.prompt.rollout} with reason {completion.finish_reason!r} after "
                    f"{self.written} of {self.limit} tokens, and none of them ends a response"
                )
            self._policy.forget(self)
        if self.finished:
            self._last = fresh
            return
        for token, logprob, support in fresh:
            self.put(token, logprob, version, support, "live")

    def release(self) -> None:
        """Let the reader have the end of the response."""
        if self._reason is None:
            raise ProtocolError(f"rollout {self.prompt.rollout} has not ended")
        last, self._last = self._last, []
        for token, logprob, support in last[:-1]:
            self.put(token, logprob, self._versions[-1], support, "live")
        token, logprob, support = last[-1]
        self.put(token, logprob, self._versions[-1], support, self._reason)

    async def aclose(self) -> None:
        """Give up the rollout and free its memory; idempotent."""
        if self.given_up:
            return
        self.given_up = True
        self.wake()
        await self._policy.abort([self])

    def usable_by(self, policy: VllmPolicy) -> bool:
        """Return whether ``policy`` may decode it."""
        return self._policy is policy and self.usable

    def _require_versions(self, completion: object) -> None:
        """Compare the versions with those that the engine names, where it names any."""
        spans = getattr(completion, "weight_versions", None)
        for span in spans or ():
            ours = set(self._versions[span.start : span.end])
            if ours - {self._policy.number_of(span.version)}:
                raise ProtocolError(
                    f"vLLM says that weights {span.version} made tokens {span.start} .. {span.end} of rollout "
                    f"{self.prompt.rollout}, which are counted as those of versions {sorted(ours)}"
                )


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
        self.stopping = StopCriteria(sampling, decode)
        self.version = 0
        self.tokens = 0
        self.reporter = Reporter("policy")
        self._limit = limit or (lambda prompt: sampling.max_new_tokens)
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
        return Capabilities(resumes="with other tokens", loads_while_decoding="between decode steps")

    @property
    def progress(self) -> int:
        """A number that grows while it decodes."""
        return self.tokens

    async def open(self, rollouts: Sequence[Prompt | Response]) -> list[VllmDecode]:
        """Return a decode for each; decoding, and the use of memory, begins with :meth:`decoding`.

        A response continues after its tokens: the model reads them, and the decode does not return them.

        Raises:
            ModelError: a prompt is empty, leaves no room for a response, or holds an id outside of the vocabulary.
        """
        return [self._opened(rollout) for rollout in rollouts]

    def _opened(self, rollout: Prompt | Response) -> VllmDecode:
        engine = self.engine
        response = response_to(rollout, engine.name, vocabulary=engine.vocabulary, longest=engine.longest)
        room = engine.longest - len(response.prompt.tokens)
        limit = min(self.sampling.max_new_tokens, room, self._limit(response.prompt))
        return VllmDecode(self, response, limit)

    @asynccontextmanager
    async def decoding(self, live: Sequence[Decode], cut: Cut) -> AsyncIterator[Decoding]:
        """Decode ``live`` while the context is open, until each has ended or ``cut`` returns true.

        Raises:
            ProtocolError: a decode is of another policy, was given up or has failed; or the policy decodes already.
            ModelLost: the engine died.
            Exception: whatever else ended decoding, with a note that names the rollouts.
        """
        decodes = self._decodable(live)
        if not decodes:
            yield FixedDecoding("vLLM")
            return
        with self.reporter.reported("decode"):
            loop = self._loop = DecodingLoop(self, decodes, cut)
            try:
                async with loop.running():
                    yield FixedDecoding("vLLM")
            finally:
                self._loop = None

    def _decodable(self, live: Sequence[Decode]) -> list[VllmDecode]:
        """Return the decodes that have not ended."""
        if self._loop is not None:
            raise ProtocolError("the policy is decoding already: leave that context before opening another")
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
        others = [decode for decode in self._submitted if decode not in decodes]
        await self.abort(others)
        for decode in decodes:
            if not decode.finished and not decode.request:
                decode.request = f"{self._nonce}-{next(self._numbers)}"
                self._submitted[decode] = None
                self.engine.requests.add(decode.request)
                prompt = prompt_of(decode, self._label(self.version))
                params = self.engine.params(params_of(self.sampling, decode))
                async with answered(self.engine.llm, shield=True):
                    decode.collector = await self.engine.llm.add_request(decode.request, prompt, params)

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
