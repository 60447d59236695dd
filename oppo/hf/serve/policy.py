"""The policy on transformers: a handle on the event loop to the core that decodes where the model lives.

A call to the core decodes the ready rows. It returns, its rows paused, when a turn was answered, a rollout joins or
weights come, and the next call has the row too, or the new weights. Where every rollout waits for an answer there is
no call, so the model's place is free. In deterministic mode decoding waits with each turn, weights wait for its end,
and a rollout joins only while a turn is unanswered.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Final, Literal, TypeAlias

import anyio

from oppo.declared import require_whole
from oppo.errors import ModelLost, ProtocolError
from oppo.events import Prompt, Response, RoutedExperts
from oppo.hf.loading import Loadable, ResidentRecipe, name_of, positions_of, sent, tensors, vocabulary_of, worker_maker
from oppo.hf.serve.decoder import Counters, Decoder, DecodeRow, PolicyCore, Signals, policy_core
from oppo.hf.weights import lie_among
from oppo.models import Capabilities, Cut, Decode, Decoding, FixedDecoding, Loads, Sampling, Weights
from oppo.placement import Callback, Hosted, Hosting
from oppo.rollout_buffer import DecodeSteps, RolloutBuffer, raise_first, response_to, unfinished
from oppo.turns import StopCriteria, turn_ended

PREFILL_TOKENS: Final = 2048  # tokens that are prefilled between two decode steps by default


HfDecode: TypeAlias = RolloutBuffer[DecodeRow | None]
"""One rollout of an :class:`HfPolicy`, with its row until the decoder has it."""


class HfPolicy:
    """A causal language model of transformers as :class:`oppo.models.Policy`.

    The tokens of a rollout depend on the weights, its prompt and the sampling settings; up to near-ties not on other
    rollouts, and never on how they are read.

    Args:
        model: a causal LM, put into evaluation mode for good; or its recipe (:class:`~oppo.hf.loading.ModelRecipe`), by
            which it is loaded where it lives, in memory of its own: it then needs the trained weights, by :meth:`load`.
        sampling: how tokens are sampled.
        place: where the model lives: a thread, a process or, for a recipe, :class:`oppo.placement.ray.RayPlace`. Places
            with ``restarts`` are refused, as rows are lost with them.
        kv_on_sync: the KV cache of rollouts, deferred or live, when weights are loaded. ``recompute``: the new weights
            read their tokens again. ``keep``: they continue with the old one, which is cheaper but mixes versions.
        deterministic: prefill row by row on a fixed grid; runs that decode the same rollouts together then agree bit
            for bit (float32 on a CPU).
        prefill_tokens: tokens, padding included, that are prefilled between two decode steps, so that live rows do not
            wait for a long prompt; ignored if ``deterministic``, which prefills all at once.
        decode: returns the text of tokens, for ``sampling.stop_strings``; called where the model lives, so for a
            process it must be picklable, as :meth:`oppo.hf.tokenizer.HfTokenizer.decode` is.
        limit: returns the length in tokens at which the response to a prompt ends; at most ``sampling.max_new_tokens``.
        counters: continued, of another policy over the same model.
        routed_experts: tokens carry the experts that a mixture chose for them (:class:`oppo.events.RoutedExperts`).

    Attributes:
        vocabulary: upper bound of token ids.
        counters: decode steps, tokens sampled and tokens prefilled so far; current also while it decodes, to within a
            second on another machine.
    """

    def __init__(
        self,
        model: Loadable,
        *,
        sampling: Sampling,
        place: Hosting,
        kv_on_sync: Literal["recompute", "keep"] = "recompute",
        deterministic: bool = False,
        prefill_tokens: int = PREFILL_TOKENS,
        decode: Callable[[Sequence[int]], str] | None = None,
        limit: Callable[[Prompt], int] | None = None,
        counters: Counters | None = None,
        routed_experts: bool = False,
    ) -> None:
        require_whole("prefill_tokens", prefill_tokens, 1)
        model = self._model = ResidentRecipe.of(model)
        self._with_sampling = partial(
            HfPolicy,
            model,
            place=place,
            kv_on_sync=kv_on_sync,
            deterministic=deterministic,
            prefill_tokens=prefill_tokens,
            decode=decode,
            limit=limit,
            routed_experts=routed_experts,
        )
        self._name = name_of(model)
        self._max_new_tokens = sampling.max_new_tokens
        self._limit = limit or (lambda prompt: sampling.max_new_tokens)
        self._longest = positions_of(model)
        self.vocabulary = vocabulary_of(model)
        self._keys = itertools.count()
        self._deterministic = deterministic
        self._calls: DecodeCalls | None = None
        self._stopping = StopCriteria(sampling, decode)
        self.counters = counters or Counters.new()
        decoder = partial(
            Decoder,
            sampling=sampling,
            deterministic=deterministic,
            prefill_tokens=prefill_tokens,
            decode=decode if sampling.stop_strings else None,
            counters=self.counters,
            routed_experts=routed_experts,
        )
        self._core = place.host(worker_maker(policy_core, model, decoder, kv_on_sync == "recompute"))

    @property
    def version(self) -> int:
        return self.counters.version

    @property
    def capabilities(self) -> Capabilities:
        """In deterministic mode, weights wait for the end of decoding, and rollouts join at unanswered turns only."""
        loads: Loads = "when decoding ends" if self._deterministic else "between decode steps"
        return Capabilities(
            adds_while_decoding=not self._deterministic,
            loads_while_decoding=loads,
            turns=True,
            adds_while_held=True,
            varies_sampling=True,
            reports_progress=True,
        )

    @property
    def progress(self) -> int:
        """The number of decode steps and of prefilled tokens so far, which grows while it decodes."""
        return self.counters.decode_steps + self.counters.prefilled

    def with_sampling(self, sampling: Sampling) -> HfPolicy:
        """Return a policy over the same model, in the same place, that draws so; it has a KV cache of its own."""
        return self._with_sampling(sampling=sampling, counters=self.counters)

    async def memory(self) -> tuple[int, int]:
        """Return the bytes allocated for the KV cache, and those that its tokens need, once decoding has ended."""
        return await self._core.call("memory", PolicyCore.memory)

    async def load(self, weights: Weights) -> None:
        """Serve ``weights.actor`` from the next decode step on; tensors that are the model's own are not copied.

        Live rollouts go on with the new weights, their KV cache as ``kv_on_sync`` says; in deterministic mode this
        waits for the end of decoding. An empty ``weights.actor`` changes the version only. Another process of this
        machine shares the memory that is written; a model that was loaded elsewhere is sent tensors, or its adapters.

        Raises:
            ModelError: a tensor is missing, unknown or of another shape; the old weights are still served.
        """
        async with nullcontext() if self._calls is None else self._calls.between_steps():
            load = partial(PolicyCore.load, version=weights.version)
            await self._core.load(load, sent(self._model, weights.actor))
            await self._core.call("refresh", PolicyCore.refresh)  # now, not when it decodes next: it frees memory

    def serves(self, weights: Weights) -> bool:
        return lie_among(weights.actor, self.tensors())

    def tensors(self) -> frozenset[int]:
        return tensors(self._model)

    async def open(self, rollouts: Sequence[Prompt | Response]) -> list[HfDecode]:
        """Return a decode for each; decoding, and the use of memory, begins with :meth:`decoding`.

        A response continues after its tokens: the model reads them, and the decode does not return them.

        Raises:
            ModelError: a prompt is empty, leaves no room for a response, or holds an id outside of the vocabulary.
        """
        return [self._opened(rollout) for rollout in rollouts]

    async def open_turns(self, rollouts: Sequence[Prompt | Response]) -> list[HfDecode]:
        """Return a decode for each whose response has turns; otherwise as :meth:`open`.

        Keys and values stay while a turn is unanswered, so that only the answer is read after it.
        """
        return [self._opened(rollout, turns=True) for rollout in rollouts]

    @asynccontextmanager
    async def decoding(self, live: Sequence[Decode], cut: Cut) -> AsyncIterator[Decoding]:
        """Decode ``live``, and what joins, while the context is open, until each has ended or ``cut`` returns true.

        The model's thread calls ``cut``, or the thread that waits for its process or actor. Leaving the context stops
        decoding after the decode step in progress; rollouts that have not ended are deferred.

        Raises:
            ProtocolError: a decode is of another policy, was closed or has failed; or the policy decodes already.
            Exception: the error of the decode loop, with a note that names the rollouts.
        """
        if self._calls is not None:
            raise ProtocolError("the policy is decoding already: leave that context before opening another")
        decodes = unfinished(live, self)
        errors = list[Exception]()
        calls = DecodeCalls(self, self._core, decodes, cut, deterministic=self._deterministic)
        async with anyio.create_task_group() as tasks:
            if decodes or not self._deterministic:
                self._calls = calls
                tasks.start_soon(self._decode, calls, errors, name="decode")
            try:
                yield calls
            except Exception as error:  # noqa: BLE001 - taken out of the task group, which would wrap it in a group
                errors.append(error)
            finally:
                calls.end()
        raise_first(errors)

    async def _decode(self, calls: DecodeCalls, errors: list[Exception]) -> None:
        failure: Exception | None = None
        try:
            await calls.run()
        except Exception as error:  # noqa: BLE001 - the boundary to the readers: each of them, and the context, raises it
            failure = error
            error.add_note(f"while decoding rollouts {[decode.prompt.rollout for decode in calls.decodes]}")
            errors.append(error)
        finally:
            for decode in calls.decodes:
                decode.defer(failure)
            self._calls = None
            closed = [decode.key for decode in calls.decodes if decode.closed]
            if closed:
                await self._forget(closed)

    async def _forget(self, keys: Sequence[int]) -> None:
        with suppress(ModelLost):  # the memory is lost with the place it was in
            await self._core.call("forget", PolicyCore.forget, keys)

    def collect(self) -> None:
        if self._calls is not None:
            self._calls.collect()

    def note_answer(self, rollout: HfDecode) -> None:
        del rollout
        if self._calls is not None:
            self._calls.note_answer()

    async def discard(self, rollout: HfDecode) -> None:
        if self._calls is not None and rollout.live:
            self._calls.drop(rollout)
        elif rollout.deferred:
            await self._forget([rollout.key])

    def _opened(self, rollout: Prompt | Response, *, turns: bool = False) -> HfDecode:
        response = response_to(rollout, self._name, vocabulary=self.vocabulary, longest=self._longest)
        prompt, length = response.prompt, len(response.prompt.tokens)
        limit = min(self._max_new_tokens, self._longest - length, self._limit(prompt))
        tokens, known = response.tokens.tolist(), response.extra[RoutedExperts].known(prompt)
        row = DecodeRow(next(self._keys), replace(prompt, columns={}), limit, tokens, turns, routed=known)
        ended = turn_ended(response, self._stopping, limit) if turns else None
        return RolloutBuffer(self, row.key, row, response, limit, turns=turns, ended=ended)


class DecodeCalls:
    """Calls the core until the cut returns true or :meth:`stop` is called; in deterministic mode, until each has ended.

    The loop over decode steps is ``Decoder._decode``, in the place of the model.
    """

    def __init__(
        self, policy: HfPolicy, core: Hosted[PolicyCore], decodes: Sequence[HfDecode], cut: Cut, *, deterministic: bool
    ) -> None:
        self.decodes = list(decodes)
        self._policy = policy
        self._core = core
        self._cut = cut
        self._deterministic = deterministic
        self._over = False
        self._ready: Sequence[HfDecode] = ()  # of the call in progress, in the order of its signals
        self._signals: Signals | None = None
        self._steps: DecodeSteps[DecodeRow | None] | None = None
        self._news = anyio.Event()
        self._call = anyio.Lock(fast_acquire=True)  # fair: waiting tasks come before the next call
        self._ended = anyio.Event()
        for decode in decodes:
            decode.begin()

    def stop(self) -> None:
        if not self._deterministic:  # of which the cut alone decides
            self.end()

    def end(self) -> None:
        self._over = True
        self._interrupt()
        self._news.set()

    def note_answer(self) -> None:
        if not self._deterministic:
            self._interrupt()
        self._news.set()

    async def add(self, decodes: Sequence[Decode]) -> None:
        # Those that come after the cut stay deferred. In deterministic mode all wait for an unanswered turn.
        if self._deterministic and not self._holds():
            await FixedDecoding(type(self._policy).__name__).add(decodes)
        joining = unfinished(decodes, self._policy)
        if live := [decode.prompt.rollout for decode in joining if decode.live]:
            raise ProtocolError(f"rollouts {live} are being decoded, so they cannot join")
        if not self._over:
            for decode in joining:
                decode.begin()
            self.decodes += joining
            self.note_answer()

    def collect(self) -> None:
        if self._steps is not None:
            self._steps.hand_out()

    def drop(self, decode: HfDecode) -> None:
        if self._signals is not None and decode in self._ready:
            self._signals.close(self._ready.index(decode))
        if decode.unanswered:
            self.note_answer()

    def _interrupt(self) -> None:
        # The call in progress returns after its decode step; the rows that have not ended are paused.
        if self._signals is not None:
            self._signals.stop()

    @asynccontextmanager
    async def between_steps(self) -> AsyncIterator[None]:
        """Keep the model from decoding, between two decode steps; in deterministic mode, wait for the end of all."""
        if self._deterministic:
            await self._ended.wait()
        self._interrupt()
        async with self._call:
            yield

    async def run(self) -> None:
        try:
            await self._run()
        finally:
            self._over = True
            self._ended.set()

    async def _run(self) -> None:
        while not self._over:
            # In deterministic mode turns end together: which rollout ends first is not up to whose answer came first.
            if not self._holds():
                await self._end_finished()
            async with self._call:
                open_ = self._open()
                if self._over or (self._deterministic and not open_):
                    return
                if not self._holds():
                    if any(decode.ending for decode in open_):  # an answer that came meanwhile
                        continue
                    if ready := [decode for decode in open_ if not decode.unanswered]:
                        await self._decode(ready)
                        continue
                self._news = anyio.Event()
            await self._news.wait()

    def _open(self) -> list[HfDecode]:
        return [decode for decode in self.decodes if decode.live and not decode.closed]

    def _holds(self) -> bool:
        return self._deterministic and any(decode.unanswered for decode in self._open())

    async def _end_finished(self) -> None:
        ended = [each for each in self.decodes if each.ending and not each.closed]
        if ended:
            ended.sort(key=lambda each: each.order)
            self._cutting([decode.prompt.rollout for decode in ended])
            for decode in ended:
                decode.end()
            await self._core.call("forget", PolicyCore.forget, [decode.key for decode in ended])

    async def _decode(self, ready: Sequence[HfDecode]) -> None:
        new = [decode.row for decode in ready if decode.row is not None]
        for decode in ready:
            decode.row = None
        answers = {decode.key: (decode.pop_answer(), decode.bounds) for decode in ready}
        self._ready, signals, steps = ready, Signals.of(len(ready)), DecodeSteps(ready)
        self._signals, self._steps = signals, steps
        cut, deliver = Callback(self._cutting), Callback(steps.push, oneway=True)
        try:
            await self._core.call("decode", PolicyCore.run, new, answers, cut, signals, deliver)
        finally:
            steps.hand_out()
            self._ready, self._signals, self._steps = (), None, None

    def _cutting(self, finished: Sequence[int]) -> bool:
        # Called on the event loop, in the model's thread, or in the thread that waits for the model's process.
        if cutting := self._cut(finished):
            self._over = True
            for decode in self.decodes:
                decode.cutting = True
        return cutting
