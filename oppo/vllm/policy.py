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
from functools import partial
from typing import Literal, cast
from uuid import uuid4

import anyio
import anyio.to_thread
from torch import Tensor

from oppo.rollout_buffer import response_to
from oppo.errors import ModelError, ModelLost, ProtocolError
from oppo.events import Prompt, Response
from oppo.models import Capabilities, Cut, Decode, Decoding, Sampling, Weights
from oppo.observe import Reporter
from oppo.stopping import Detokenize, StopCriteria, turn_ended
from oppo.vllm.requests import VllmDecode
from oppo.vllm.decoding import DecodingLoop
from oppo.vllm.engine import VllmEngine
from oppo.vllm.surface import advice, answered, engine_calls
from oppo.vllm.publish import GRACE, cancelled_after
from oppo.vllm.requests import params_of, prompt_of, reports_supports
from oppo.vllm.sampling import VllmSampling
from oppo.vllm.surface import Output


class VllmPolicy:
    """A causal language model of vLLM as :class:`oppo.models.Policy`.

    Tokens of a rollout depend on the seed, its admission number and its sample, and, by rounding, on what is decoded
    beside it. A rollout that is carried over, or that the engine preempts, keeps its noise. One that is opened
    half-written, in a resumed run, goes on with other draws of the same distribution.

    Args:
        engine: is started, and used by one policy at a time; requests of an earlier policy are discarded.
        sampling: how tokens are drawn; ``top_p`` alone leaves it without :attr:`~oppo.models.Capabilities.supports`, so
            that nothing can be trained on them.
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
        self._rounded: float | None = None
        self._lost: ModelLost | None = None
        self._submitted: dict[VllmDecode, None] = {}  # an ordered set: those whose requests are in the engine
        self._loop: DecodingLoop | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Its capabilities under its sampling."""
        return Capabilities(
            supports=reports_supports(self.sampling),
            resumes="with other tokens",
            adds_while_decoding=True,
            loads_while_decoding="between decode steps",
            turns=True,
        )

    @property
    def progress(self) -> int:
        """A number that grows while it decodes."""
        return self.tokens

    @property
    def sync_metrics(self) -> Mapping[str, float]:
        """Metrics of the last weight sync, by name."""
        return {} if self._rounded is None else {"sync/rounding_loss": self._rounded}

    def with_sampling(self, sampling: Sampling) -> VllmSampling:
        """Return a policy on the same engine, with the same weights, that draws so.

        While it decodes, the engine discards the requests of rollouts that are parked; they go on later with other
        draws, as those of a resumed run do.
        """
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
        params = self.engine.params(params_of(decode.sampling, decode, self.engine.vocabulary))
        async with answered(self.engine, shield=True):
            decode.submitted(decode.request, await self.engine.llm.add_request(decode.request, prompt, params))

    def note_answer(self, decode: VllmDecode) -> None:
        """Have a decode whose turn was answered join the others, or end."""
        if self._loop is not None:
            self._loop.note_answer(decode)

    def notice(self) -> None:
        """Have decoding look at the rollouts: one has ended, has failed or was given up."""
        if self._loop is not None:
            self._loop.notice()

    async def abort(self, decodes: Sequence[VllmDecode]) -> None:
        """Discard the requests of decodes; an engine that is dead or closed has none."""
        ids = [decode.request for decode in decodes if decode.request]
        for decode in decodes:
            self.forget(decode)
        if ids and not self.engine.closed and not self.engine.llm.errored:
            async with answered(self.engine, shield=True):
                await self.engine.llm.abort(ids)

    def forget(self, decode: VllmDecode) -> None:
        """Note that the engine has no request for a decode."""
        self.engine.requests.discard(decode.request)
        decode.request, decode.collector = "", None
        self._submitted.pop(decode, None)

    async def prepare(self) -> None:
        """Pause the engine; before its first use, discard what an earlier policy has left in it.

        Raises:
            ModelLost: the engine is dead, or serves unknown weights.
            ProtocolError: the engine is closed, or works on another event loop.
        """
        async with self._gate:
            await self._prepare()

    async def _prepare(self) -> None:
        if self._lost is not None:
            raise ModelLost(f"nothing is decoded any more: {self._lost}")
        await self._pause()
        if self._prepared:
            return
        async with answered(self.engine, shield=True):
            if left := sorted(self.engine.requests):
                self.engine.requests.clear()
                await self.engine.llm.abort(left)
            await self.engine.llm.update_weight_version(self._label(self.version))
        self._prepared = True

    async def pause(self) -> None:
        """Stop the engine between two decode steps, and drain what it made; it may be paused already.

        Raises:
            ModelLost: the engine is dead, or serves unknown weights.
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
            async with answered(self.engine, shield=True):
                await self.engine.llm.pause_generation(mode="keep", clear_cache=False)
            self._paused = True
        self._drain()

    async def _resume(self) -> None:
        """Let the engine go on without the requests of responses that have ended, by a stop string for example."""
        if self._lost or self._loop is None or not self._loop.wants_tokens or not self._paused:
            return
        await self.abort([decode for decode in self._submitted if decode.idle])
        if not self.engine.llm.errored:
            async with answered(self.engine, shield=True):
                await self.engine.llm.resume_generation()
            self._paused = False

    def _drain(self) -> None:
        """Take what the engine, which is paused, had made by then; what ended is withheld."""
        for decode in list(self._submitted):
            if decode.collector is not None and not decode.idle and not decode.error:
                try:
                    with engine_calls(self.engine):
                        output = decode.collector.get_nowait()
                    if output is not None:
                        self.take(decode, output)
                except Exception as error:  # noqa: BLE001 - raised by the decoding that it spoils
                    decode.error = error
                    self.notice()

    def take(self, decode: VllmDecode, output: Output) -> None:
        """Take what is new of a rollout.

        Each token is counted to the weights that the engine names: its output may come when others are served already.

        Raises:
            ModelError: a log-prob is not finite, or the engine ended the request for a reason of its own.
            ProtocolError: the engine says that other weights made a token.
        """
        before = decode.written
        try:
            decode.take(output, partial(self._version_at, self._starts(decode, output)))
        finally:
            self.tokens += decode.written - before
            if decode.idle:
                self.notice()

    async def load(self, weights: Weights) -> None:
        """Serve the actor's weights from the next decode step on, those of adapters merged; the engine is paused.

        An empty ``weights.actor`` changes the version only: the actor was not trained. A cancellation waits
        :data:`GRACE` seconds for the engine to have the weights.

        Raises:
            ModelError: the weights are not those of the engine's model, or could not be sent; the old ones are served.
            ModelLost: it is not known which weights are served, or the engine is dead; nothing is decoded any more.
            ProtocolError: the engine is closed, or works on another event loop.
        """
        with self.reporter.reported("load"):
            actor = await anyio.to_thread.run_sync(self._merged, weights) if weights.merge else weights.actor
            tensors = cast("Mapping[str, Tensor]", actor)
            if tensors and self.engine.weights is not None:
                self.engine.weights.require(tensors)
            async with self._gate:
                try:
                    await self._prepare()
                    async with cancelled_after(GRACE):
                        await self._send(tensors, weights.version)
                finally:
                    await self._resume()

    def _merged(self, weights: Weights) -> Mapping[str, object]:
        """Return the actor's weights with its adapters, of which 16 bits would round most away."""
        from oppo.hf.lora import rounding_loss  # noqa: PLC0415 - transformers takes seconds to import

        actor, engine = weights.standalone(), self.engine
        self._rounded = rounding_loss(weights.actor, actor, engine.dtype)
        if self._rounded and not engine.dtype_chosen:
            raise ModelError(
                f"adapters are merged into the weights of {engine.name}, which vLLM has in {engine.dtype}, and that "
                f"rounds {self._rounded:.0%} of what they add away: start the engine with dtype = 'float32', or, if "
                "it should be so, with this dtype in its arguments"
            )
        return actor

    async def _send(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Have the engine serve weights; unless it is known which it serves afterwards, it is lost."""
        self._lost = ModelLost(
            f"publishing version {version} was cancelled before vLLM had its weights, so which it serves is unknown: "
            f"{advice(self.engine)}"
        )
        try:
            await self._publish(tensors, version)
            self._lost = None
        except ModelLost as error:
            self._lost = error
            raise
        except ModelError:  # the old ones are served
            self._lost = None
            raise
        finally:
            if self._lost is not None and self._loop is not None:
                self._loop.fail(self._lost)

    async def _publish(self, tensors: Mapping[str, Tensor], version: int) -> None:
        llm = self.engine.llm
        async with answered(self.engine):
            if tensors:
                await self.engine.sender.send(llm, tensors, self._label(version))
            else:
                await llm.update_weight_version(self._label(version))
            self.version = version
            if tensors and self._recompute and not await llm.reset_prefix_cache(reset_running_requests=True):
                raise ModelLost(f"vLLM has kept keys and values of the weights before version {version}")

    def _starts(self, decode: VllmDecode, output: Output) -> Sequence[tuple[str, int]]:
        """Return the labels of the weights behind a request's tokens, each with the index of its first token."""
        if spans := getattr(output.outputs[0], "weight_versions", None):
            return [(span.version, span.start) for span in spans]
        states = self.engine.llm.output_processor.request_states
        state = None if decode.collector is None else states.get(decode.collector.request_id)
        return () if state is None else state.weight_version_starts

    def _version_at(self, starts: Sequence[tuple[str, int]], index: int) -> int:
        label = next((label for label, start in reversed(starts) if start <= index), self._label(self.version))
        if (version := self.number_of(label)) is None:
            raise ProtocolError(
                f"vLLM says that weights {label} made token {index} of a request, and this policy has had it load "
                f"versions up to {self.version}, as {self._label(self.version)}"
            )
        return version

    def _label(self, version: int) -> str:
        return f"{self._nonce}-{version}"

    def number_of(self, label: str) -> int | None:
        """Return the version with this label; ``None`` for a label of another policy."""
        nonce, _, number = label.rpartition("-")
        return int(number) if nonce == self._nonce and number.isdecimal() else None
