"""The policy on vLLM: the actor decodes in the engine's processes, and the trainer syncs its weights to it.

::

    decoding            one request a rollout; the engine is paused between two decodings
    cut                 the engine is paused, its tokens until then are drained, and requests stay as they are
    overrun             rollouts that finished between the cut and the pause: reported first at the next decoding
    load                paused, drained, new weights, resumed: between two decode steps
    sleep               after a decoding; weights wake to be loaded, the KV cache wakes for the next decoding

In a decoding a pump for each rollout takes tokens as they come, until a response or a turn of it ends; an answer, or a
rollout that joins, starts another. The umpire waits until a response has ended, lets the other pumps of the same decode
step run, and calls the cut with all of them, in admission order. Where the cut returns true, the engine is paused and
drained; rollouts that ended by then are withheld. No task outlives the context.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Final, Literal, cast
from uuid import uuid4

import anyio
import anyio.lowlevel
import anyio.to_thread
from anyio.abc import TaskGroup
from torch import Tensor

from oppo.errors import ModelError, ModelLost, ProtocolError, leaves
from oppo.events import Prompt, Response
from oppo.log import logger
from oppo.models import Capabilities, Cut, Decode, Decoding, Detokenize, Sampling, Weights
from oppo.observe import Reporter
from oppo.rollout_buffer import raise_first, response_to, unfinished
from oppo.turns import StopCriteria
from oppo.vllm.engine import GRACE, Engine, NewTokens, Request, VllmDecode, cancelled_after, reports_supports
from oppo.vllm.sync import untied

TOLERATED: Final = 0.01  # the share of the adapters' change that rounding may lose without a warning


class VllmPolicy:
    """A causal language model of vLLM as :class:`oppo.models.Policy`.

    Tokens of a rollout depend on the seed, its admission number and its sample, and, by rounding, on the
    rollouts beside it. A rollout that is deferred, or that the engine preempts, keeps its noise. One that is opened
    half-written, in a resumed run, or that is deferred on a server, goes on with other draws of the same distribution.

    Args:
        engine: a :class:`~oppo.vllm.VllmEngine` or a :class:`~oppo.vllm.VllmServer`, used by one policy at a time;
            requests of an earlier policy are discarded.
        sampling: how tokens are sampled; ``top_p`` leaves it without :attr:`~oppo.models.Capabilities.supports`, so
            that nothing can be trained on them.
        kv_on_sync: ``recompute``: new weights read the tokens of deferred rollouts again before they continue.
            ``keep``: they continue with the old KV cache, which is cheaper but mixes versions.
        decode: returns the text of tokens; ``sampling.stop_strings`` need it. It is called on the event loop.
        limit: returns the length in tokens at which the response to a prompt ends; ``sampling.max_new_tokens`` bounds
            it, and is the default.
        routed_experts: tokens carry the experts of a mixture (:class:`oppo.events.RoutedExperts`); the engine must have
            been started with ``enable_return_routed_experts``.

    Raises:
        ConfigError: a server cannot keep the KV cache over a weight sync, or give routed experts.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        sampling: Sampling,
        kv_on_sync: Literal["recompute", "keep"] = "recompute",
        decode: Detokenize | None = None,
        limit: Callable[[Prompt], int] | None = None,
        routed_experts: bool = False,
    ) -> None:
        engine.check_options(keeps_kv=kv_on_sync == "keep", routed_experts=routed_experts)
        self.engine = engine
        self.vocabulary = engine.vocabulary
        self.model_name = engine.name
        self._routed_experts = routed_experts
        self.sampling = sampling
        self._decode = decode
        self._stopping = StopCriteria(sampling, decode)
        self.version = 0
        self.tokens = 0
        self.reporter = Reporter("policy")
        self._limit = limit or (lambda prompt: engine.longest)
        self._recompute = kv_on_sync == "recompute"
        self._nonce = uuid4().hex[:12]
        self._numbers = itertools.count()
        self.gate = anyio.Lock()  # of the engine's pauses and weights
        self._paused = self._prepared = False
        self._synced = dict[str, float]()
        self._warned = False
        self._lost: ModelLost | None = None
        self._submitted: dict[Request, None] = {}  # an ordered set: those that are in the engine
        self._loop: DecodingLoop | None = None

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            supports=reports_supports(self.sampling),
            resumes="with other tokens",
            defers=self.engine.defers,
            adds_while_decoding=True,
            loads_while_decoding="between decode steps",
            turns=True,
            varies_sampling=True,
            reports_progress=True,
        )

    @property
    def progress(self) -> int:
        return self.tokens

    @property
    def free_kv_tokens(self) -> int | None:
        """Free tokens of the KV cache; ``None`` if the engine does not say how many it holds."""
        if self.engine.kv_tokens is None:
            return None
        return self.engine.kv_tokens - sum(len(each.prompt.tokens) + each.written for each in self._submitted)

    @property
    def sync_metrics(self) -> Mapping[str, float]:
        """Metrics of the last weight sync, by name."""
        return self._synced

    def with_sampling(self, sampling: Sampling) -> VllmSampling:
        """Return a policy on the same engine, with the same weights, that draws so.

        While it decodes, the engine discards the requests of rollouts that are deferred; they go on later with other
        draws, as in a resumed run.
        """
        return VllmSampling(self, sampling, StopCriteria(sampling, self._decode))

    async def open(self, rollouts: Sequence[Prompt | Response]) -> list[VllmDecode]:
        """Return a decode for each; decoding, and the use of memory, begins with :meth:`decoding`.

        A response continues after its tokens: the model reads them, and the decode does not return them. A prompt that
        the model cannot read is a ``ModelError``.
        """
        return [self.opened(rollout, self.sampling, self._stopping) for rollout in rollouts]

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> list[VllmDecode]:
        """Return a decode for each whose response has turns; otherwise as :meth:`open`.

        After an answer comes a new request, which finds the turn in the prefix cache.
        """
        return [self.opened(rollout, self.sampling, self._stopping, turns=True) for rollout in rollouts]

    def opened(
        self, rollout: Prompt | Response, sampling: Sampling, stopping: StopCriteria, *, turns: bool = False
    ) -> VllmDecode:
        engine = self.engine
        response = response_to(rollout, engine.name, vocabulary=engine.vocabulary, longest=engine.longest)
        if response.prompt.images and engine.blind:
            raise ModelError(f"the prompt of rollout {response.prompt.rollout} shows images, and {engine.blind}")
        room = engine.longest - len(response.prompt.tokens)
        limit = min(sampling.max_new_tokens, room, self._limit(response.prompt))
        key = next(self._numbers)
        return Request(
            self,
            key,
            response,
            limit,
            sampling=sampling,
            stopping=stopping,
            turns=turns,
            routed_experts=self._routed_experts,
        ).rollout

    @asynccontextmanager
    async def decoding(self, live: Sequence[Decode], cut: Cut) -> AsyncIterator[Decoding]:
        """Decode ``live``, and what joins, while the context is open, until ``cut`` returns true.

        Raises:
            ProtocolError: a decode is of another policy, was closed or has failed; or the policy decodes already.
            ModelLost: the engine died.
        """
        if self._loop is not None:
            raise ProtocolError("the policy is decoding already: leave that context before opening another")
        if self.engine.adapts and not self.engine.adapter:
            raise ProtocolError(
                f"{self.model_name} was started for adapters and has none yet: load those that are trained first, as "
                "oppo train does (policy.load)"
            )
        requests = self.unfinished(live)
        with self.reporter.reported("decode"):
            loop = self._loop = DecodingLoop(self, requests, cut)
            try:
                async with loop.running():
                    yield loop
            finally:
                self._loop = None
        if self.engine.sleeps and "weights" not in self.engine.asleep:
            async with self.gate:
                if self.engine.asleep:  # in part, and vLLM falls asleep as a whole
                    await self.engine.wake("kv_cache")
                    self._paused = False
                await self.pause()
                with self.reporter.reported("sleep"):
                    await self.engine.fall_asleep()

    def unfinished(self, live: Sequence[Decode]) -> list[Request]:
        return [rollout.row for rollout in unfinished(live, self)]

    async def submit(self, requests: Sequence[Request]) -> None:
        """Have the engine, which is paused, hold these requests and no other."""
        await self.abort([each for each in self._submitted if each not in requests or each.collector is None])
        for request in requests:
            if not request.idle and not request.id:
                await self.request(request)

    async def request(self, request: Request) -> None:
        async with self.gate:  # until the engine has it, under the salt of the weights that it serves
            if request.rollout.closed:  # meanwhile
                return
            request.id = f"{self._nonce}-{next(self._numbers)}"
            self._submitted[request] = None
            self.engine.requests.add(request.id)
            salt, params = self._label(self.version), request.params(self.engine.vocabulary)
            async with self.engine.answered(shield=True):
                request.submitted(
                    await self.engine.submit(request.id, request.sequence, salt, params, request.prompt.images)
                )

    def collect(self) -> None:
        """Do nothing: pumps put tokens into the buffers as they come."""

    def note_answer(self, rollout: VllmDecode) -> None:
        rollout.row.answered()
        if self._loop is not None:
            self._loop.note_answer(rollout.row)

    async def discard(self, rollout: VllmDecode) -> None:
        self.notice()
        await self.abort([rollout.row])

    def notice(self) -> None:
        # Decoding looks at the rollouts: one has ended, has failed or was closed.
        if self._loop is not None:
            self._loop.notice()

    async def abort(self, requests: Sequence[Request]) -> None:
        ids = [request.id for request in requests if request.id]
        for request in requests:
            self._forget(request)
        if ids and not self.engine.closed and not self.engine.errored:  # else it has none
            async with self.engine.answered(shield=True):
                await self.engine.discard(ids)

    def _forget(self, request: Request) -> None:
        self.engine.requests.discard(request.id)
        request.id, request.collector = "", None
        self._submitted.pop(request, None)

    async def prepare(self) -> None:
        """Pause the engine; before its first use, discard what an earlier policy has left in it."""
        if self._lost is not None:
            raise ModelLost(f"nothing is decoded any more: {self._lost}")
        await self.pause()
        if self._prepared:
            return
        async with self.engine.answered(shield=True):
            if left := sorted(self.engine.requests):
                self.engine.requests.clear()
                await self.engine.discard(left)
            await self.engine.name_version(self._label(self.version))
        self._prepared = True

    async def pause(self) -> None:
        """Stop the engine between two decode steps, and drain what it made; it may be paused already."""
        if not self._paused:
            async with self.engine.answered(shield=True):
                await self.engine.pause()
            self._paused = True
        self._drain()

    async def resume(self) -> None:
        if self._lost or self._loop is None or not self._loop.wants_tokens or not self._paused:
            return
        await self.abort([request for request in self._submitted if request.idle])
        if not self.engine.errored:
            await self.engine.wake("weights", "kv_cache")
            async with self.engine.answered(shield=True):
                await self.engine.resume()
            self._paused = False

    def _drain(self) -> None:
        for request in list(self._submitted):
            if request.collector is not None and not request.idle and not request.error:
                try:
                    with self.engine.as_lost():
                        new = request.collector.get_nowait()
                    if new is not None:
                        self.take(request, new)
                except Exception as error:  # noqa: BLE001 - raised by the decoding that it spoils
                    request.error = error
                    self.notice()

    def take(self, request: Request, new: NewTokens) -> None:
        before = request.written
        try:
            if request.take(new, partial(self._version_at, new.starts)):
                self._forget(request)
        finally:
            self.tokens += request.written - before
            if request.idle:
                self.notice()

    async def load(self, weights: Weights) -> None:
        """Serve the actor's weights from the next decode step on, adapters merged or alone.

        An empty ``weights.actor`` changes the version only: the actor was not trained. A cancellation waits
        :data:`GRACE` seconds for the engine to have the weights.

        Raises:
            ModelError: the weights are of another model, or could not be sent; the old ones are served.
            ModelLost: it is not known which weights are served, or the engine is dead; nothing is decoded any more.
        """
        with self.reporter.reported("load"):
            by_adapters = self.engine.adapts or weights.merge is not None
            adapted = bool(weights.actor) and by_adapters
            actor = await anyio.to_thread.run_sync(self._adapted, weights) if adapted else weights.actor
            tensors = cast("Mapping[str, Tensor]", actor)
            if tensors and self.engine.weights is not None and not self.engine.adapts:
                self.engine.weights.check(tensors)
                if self.engine.weights.outline is not None:
                    tensors = await anyio.to_thread.run_sync(self.engine.weights.as_saved, tensors)
            self._synced["sync/bytes"] = float(sum(each.nbytes for each in untied(tensors).values()))
            async with self.gate:
                try:
                    await self.prepare()
                    if tensors:
                        await self.engine.wake("weights")
                    async with cancelled_after(GRACE):
                        await self._send(tensors, weights.version)
                finally:
                    await self.resume()

    def _adapted(self, weights: Weights) -> Mapping[str, object]:
        # The part of weights with adapters that is sent; transformers takes seconds to import.
        from oppo.hf.lora import adapter_rounding_loss, rounding_loss  # noqa: PLC0415

        engine = self.engine
        if not engine.adapts:
            actor = weights.standalone()
            lost = rounding_loss(weights.actor, actor, engine.dtype)
        elif weights.adapters is None:
            raise ModelError(
                f"{engine.name} was started for adapters, and these weights have none: train some, or start the engine "
                "without (adapters=)"
            )
        else:
            actor = weights.adapters()
            lost = adapter_rounding_loss(cast("Mapping[str, Tensor]", actor), engine.dtype)
        self._synced["sync/rounding_loss"] = lost
        if lost and not engine.adapts and not engine.dtype_chosen:
            raise ModelError(
                f"adapters are merged into the weights of {engine.name}, which vLLM has in {engine.dtype}, and that "
                f"rounds {lost:.0%} of what they add away: start the engine with dtype = 'float32', or, if "
                "it should be so, with this dtype in its arguments"
            )
        if lost > TOLERATED and not self._warned:
            self._warned = True
            logger.warning(
                f"syncing version {weights.version}: {engine.dtype}, the dtype of {engine.name} in vLLM, rounds "
                f"{lost:.0%} of what the adapters add to its weights away; see sync/rounding_loss"
            )
        return actor

    async def _send(self, tensors: Mapping[str, Tensor], version: int) -> None:
        # Unless it is known which weights the engine serves afterwards, it is lost.
        try:
            await self._transfer(tensors, version)
        except ModelLost as error:
            self._lose(error)
            raise
        except ModelError:  # the old ones are served
            raise
        except BaseException:
            self._lose(
                ModelLost(
                    f"syncing version {version} was cancelled before vLLM had its weights, so which it serves is "
                    f"unknown: {self.engine.advice}"
                )
            )
            raise

    def _lose(self, error: ModelLost) -> None:
        self._lost = error
        if self._loop is not None:
            self._loop.fail(error)

    async def _transfer(self, tensors: Mapping[str, Tensor], version: int) -> None:
        async with self.engine.answered():
            if tensors:
                await self.engine.sender.send(self.engine, tensors, self._label(version))
            else:
                await self.engine.name_version(self._label(version))
            self.version = version
            if tensors and self._recompute and not await self.engine.recompute():
                raise ModelLost(f"vLLM has kept the KV cache of the weights before version {version}")

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
        nonce, _, number = label.rpartition("-")
        return int(number) if nonce == self._nonce and number.isdecimal() else None  # of another policy


class VllmSampling:
    def __init__(self, policy: VllmPolicy, sampling: Sampling, stopping: StopCriteria) -> None:
        self._policy = policy
        self._sampling = sampling
        self._stopping = stopping

    @property
    def version(self) -> int:
        return self._policy.version

    @property
    def capabilities(self) -> Capabilities:
        supports = reports_supports(self._sampling)
        return replace(self._policy.capabilities, supports=supports, varies_sampling=False, reports_progress=False)

    async def load(self, weights: Weights) -> None:
        await self._policy.load(weights)

    async def open(self, rollouts: Sequence[Prompt | Response]) -> list[VllmDecode]:
        return [self._policy.opened(rollout, self._sampling, self._stopping) for rollout in rollouts]

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> list[VllmDecode]:
        return [self._policy.opened(rollout, self._sampling, self._stopping, turns=True) for rollout in rollouts]

    def decoding(self, live: Sequence[Decode], cut: Cut) -> AbstractAsyncContextManager[Decoding]:
        return self._policy.decoding(live, cut)


class DecodingLoop:
    def __init__(self, policy: VllmPolicy, requests: Sequence[Request], cut: Cut) -> None:
        self._policy = policy
        self._begun = requests  # some may have ended in the overrun of an earlier cut
        self._requests = list(requests)  # with those that join
        self._cut: Cut | None = cut
        self._errors: list[Exception] = []
        self._news = anyio.Event()
        self._answered: list[Request] = []

    @property
    def wants_tokens(self) -> bool:
        return self._cut is not None and any(each.rollout.live and not each.idle for each in self._requests)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        for request in self._requests:
            request.rollout.begin()
        async with self._policy.engine.streaming(), anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, name="decode")
            try:
                yield
            except Exception as error:  # noqa: BLE001 - taken out of the task group, which would wrap it in a group
                self._collect(error)
            finally:
                self._cut = None
                tasks.cancel_scope.cancel()
                with anyio.CancelScope(shield=True):
                    await self._stop()
        raise_first(self._errors)

    async def _run(self) -> None:
        try:
            async with self._policy.gate:
                await self._policy.prepare()
            self._require_sound()
            await self._policy.submit(self._begun)
            if self._report():
                async with anyio.create_task_group() as pumps:
                    for request in self._begun:
                        if not request.idle:
                            pumps.start_soon(self._pump, request, name=f"pump of rollout {request.prompt.rollout}")
                    await self._resume()
                    await self._umpire(pumps)
                    pumps.cancel_scope.cancel()
            await self._stop()
        except Exception as error:  # noqa: BLE001 - the boundary to the readers: each of them, and the context, raises it
            self._fail(error)

    async def _pump(self, request: Request) -> None:
        collector = request.collector
        try:
            while collector is not None and request.collector is collector and not request.idle and not request.error:
                with self._policy.engine.as_lost():
                    new = await collector.get()
                if request.collector is collector:  # else it was closed
                    self._policy.take(request, new)
        except Exception as error:  # noqa: BLE001 - raised by the umpire
            request.error = error
        self.notice()

    def notice(self) -> None:
        self._news.set()

    def fail(self, error: Exception) -> None:
        self._collect(error)
        self.notice()

    async def add(self, decodes: Sequence[Decode]) -> None:
        for request in self._policy.unfinished(decodes) if self._cut is not None else ():
            request.rollout.begin()
            self._requests.append(request)
            self.note_answer(request)

    def stop(self) -> None:
        self._cut = None
        self.notice()

    def note_answer(self, request: Request) -> None:
        self._answered.append(request)
        self.notice()

    async def _umpire(self, pumps: TaskGroup) -> None:
        while self._cut is not None:
            await self._news.wait()
            self._news = anyio.Event()
            await anyio.lowlevel.checkpoint()  # the pumps of the same decode step come first
            self._require_sound()
            answered, self._answered = self._answered, []
            over = [each for each in self._requests if each.idle and each.id]
            await self._policy.abort([*over, *(each for each in answered if each.id)])
            if not self._report():
                return
            for request in answered:
                if not request.idle and not request.rollout.closed:
                    await self._policy.request(request)
                    pumps.start_soon(self._pump, request, name=f"pump of rollout {request.prompt.rollout}")
            if answered:
                await self._resume()

    async def _resume(self) -> None:
        async with self._policy.gate:
            await self._policy.resume()

    def _report(self) -> bool:
        withheld = [each for each in self._requests if each.withheld and each.rollout.live and not each.rollout.closed]
        ended = sorted(withheld, key=lambda each: each.rollout.order)
        if ended and self._cut is not None:
            if self._cut([request.prompt.rollout for request in ended]):
                self._cut = None
            for request in ended:
                request.release()
        return self._cut is not None

    def _require_sound(self) -> None:
        self._collect()
        if self._errors:
            raise self._errors[0]

    def _collect(self, *errors: Exception) -> None:
        for error in (*errors, *(each.error for each in self._requests if not each.rollout.closed)):
            if error is not None and all(error is not each for each in self._errors):
                self._errors.append(error)

    async def _stop(self) -> None:
        try:
            if any(request.id and not request.idle for request in self._requests):
                async with self._policy.gate:
                    await self._policy.pause()
        except Exception as error:  # noqa: BLE001 - raised when the context is left
            self._collect(error)
        self._collect()
        for request in self._requests:
            request.rollout.defer(None)

    def _fail(self, error: Exception) -> None:
        failure = leaves(error)[0]
        if not isinstance(failure, Exception):
            raise error
        failure.add_note(f"while decoding rollouts {[request.prompt.rollout for request in self._requests]}")
        self._cut = None
        self._errors = [failure, *(each for each in self._errors if each is not failure)]
        for request in self._requests:
            request.rollout.defer(failure)
