"""The policy on transformers: the decode loop in the model's thread, its readers on the event loop."""

from __future__ import annotations

import itertools
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.lowlevel
import numpy as np

from oppo.errors import ModelError, ModelLost, ProtocolError, leaves
from oppo.events import Prompt, Response
from oppo.hf.decoding import Counters, Decoder, Row
from oppo.hf.delivery import Delivery
from oppo.hf.weights import adopt
from oppo.models import Capabilities, Cut, Decode, Decoding, FixedDecoding, Piece, PieceState, Sampling, Weights
from oppo.numeric import require_whole
from oppo.support import Support

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from oppo.placement import Thread


class HfDecode:
    """One rollout of a :class:`HfPolicy`: its tokens wait here until they are read.

    Lives on the event loop. Readers use ``read`` and ``aclose``; the other methods are the policy's.
    """

    def __init__(self, policy: HfPolicy, row: Row) -> None:
        self.row = row
        self.enough = 0
        self._policy = policy
        self._delivery: Delivery | None = None
        self._taken = len(row.tokens)
        self._unread: list[tuple[int, float, int, Support]] = []
        self._state: PieceState = "cut"
        self._failure: Exception | None = None
        self._wanted = 0
        self._news: anyio.Event | None = None

    @property
    def live(self) -> bool:
        """Whether it is being decoded right now."""
        return self._state == "live"

    @property
    def ended(self) -> bool:
        """Whether the response is complete."""
        return self._state not in ("live", "cut")

    async def read(self, limit: int) -> Piece:
        """Return the next ``limit`` tokens, or fewer at the end of the response or at the cut.

        Outside of :meth:`HfPolicy.decoding` it does not wait. Cancel-safe: a cancelled read has taken nothing.

        Raises:
            ProtocolError: another read is waiting, the rollout was given up, or its last piece has been read.
            ValueError: ``limit`` is less than 1.
            Exception: whatever ended the decode loop.
        """
        if limit < 1:
            raise ValueError(f"a read takes at least 1 token, not {limit}")
        await anyio.lowlevel.checkpoint()
        if self._news is not None:
            raise ProtocolError(f"two reads of rollout {self.row.prompt.rollout} at once: it has one reader")
        self._wanted, self.enough = limit, self._taken + limit
        if self._delivery is not None:
            self._delivery.show()
        while not self._readable():
            self._news = anyio.Event()
            try:
                await self._news.wait()
            finally:
                self._news = None
        return self._take(limit)

    async def aclose(self) -> None:
        """Give up the rollout and its memory; idempotent. While it is decoded, the memory goes at the next step."""
        if self.row.given_up:
            return
        self.row.given_up = True
        self._wake()
        await self._policy.release(self)

    def resumable(self, policy: HfPolicy) -> bool:
        """Whether ``policy`` may decode it."""
        return self._policy is policy and not self.row.given_up and self._failure is None

    def resume(self, delivery: Delivery) -> None:
        """Take note that decoding (re)starts, and by whom its tokens come."""
        self._state, self._delivery = "live", delivery

    def put(self, token: int, logprob: float, version: int, support: Support, state: PieceState) -> None:
        """Append a token to what can be read."""
        self._unread.append((token, logprob, version, support))
        self._state = state
        if self._readable():
            self._wake()

    def park(self, failure: Exception | None) -> None:
        """Take note that decoding is over: parked if it was live, for good if it failed."""
        self._delivery = None
        if self.live:
            self._state, self._failure = "cut", failure
            self._wake()

    def _readable(self) -> bool:
        return not self.live or self.row.given_up or len(self._unread) >= self._wanted

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    def _take(self, limit: int) -> Piece:
        rollout = self.row.prompt.rollout
        if self.row.given_up:
            raise ProtocolError(f"rollout {rollout} was given up, so it cannot be read")
        if not self._unread and self._failure is not None:
            raise self._failure
        if not self._unread and self.ended:
            raise ProtocolError(f"the last piece of rollout {rollout} has been read; expected no further read")
        taken, self._unread = self._unread[:limit], self._unread[limit:]
        self._taken += len(taken)
        tokens, logprobs, versions, supports = zip(*taken, strict=True) if taken else ((), (), (), ())
        more = bool(self._unread) or self._failure is not None
        return Piece(
            np.array(tokens, np.int32),
            np.array(logprobs, np.float32),
            np.array(versions, np.int32),
            "live" if more else self._state,
            Support.concatenate((support, 1) for support in supports),
        )


class HfPolicy:
    """A causal language model of transformers as :class:`oppo.models.Policy`.

    The tokens of a rollout depend on the weights, its prompt and the sampling settings; up to near-ties they do not
    depend on what else is decoded beside it, and never on how they are read.

    Args:
        model: a causal LM; put into evaluation mode for good.
        sampling: how tokens are drawn.
        thread: where the model works.
        on_publish: what becomes of the keys and values of parked rollouts when weights are loaded. ``recompute``: their
            tokens are read again before they go on, as if the new weights had written them all. ``keep``: they go on
            as they are, cheaper but a mixture of versions.
        exact: read prompts row by row on a fixed grid; then runs in which the same rollouts are decoded together
            agree bit for bit (float32 on a CPU).
        prefill_tokens: how many tokens, padding included, are read between two decode steps, so that a long prompt
            holds nobody up; with ``exact`` all are read at once.
        decode: gives the text of tokens; needed for ``sampling.stop_strings``, and called from the model's thread.
        limit: at how many tokens, ``sampling.max_new_tokens`` at most, the response to a prompt ends in any case.

    Example:
        >>> from oppo.placement import Thread
        >>> from transformers import LlamaConfig, LlamaForCausalLM
        >>> config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        ...                      num_attention_heads=2)
        >>> with Thread("actor") as thread:
        ...     policy = HfPolicy(LlamaForCausalLM(config), sampling=Sampling(max_new_tokens=8), thread=thread)
        >>> policy.version
        0
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        sampling: Sampling,
        thread: Thread,
        on_publish: Literal["recompute", "keep"] = "recompute",
        exact: bool = False,
        prefill_tokens: int = 2048,
        decode: Callable[[Sequence[int]], str] | None = None,
        limit: Callable[[Prompt], int] | None = None,
    ) -> None:
        require_whole("prefill_tokens", prefill_tokens, 1)
        self._model = model
        self._sampling = sampling
        self._thread = thread
        self._limit = limit or (lambda prompt: sampling.max_new_tokens)
        self._recompute = on_publish == "recompute"
        self._decoder = Decoder(model, sampling=sampling, exact=exact, prefill_tokens=prefill_tokens, decode=decode)
        self._vocabulary = next(model.get_input_embeddings().parameters()).shape[0]
        self._keys = itertools.count()
        self._decoding = False

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._decoder.version

    @property
    def capabilities(self) -> Capabilities:
        """What it can do: weights that come while something is decoded wait for the end of that."""
        return Capabilities(loads_while_decoding="when decoding ends")

    @property
    def counters(self) -> Counters:
        """Decode steps, tokens made and tokens prefilled so far."""
        return self._decoder.counters

    @property
    def memory(self) -> tuple[int, int]:
        """Bytes allocated for keys and values, and bytes that the tokens read so far need; ask between steps."""
        return self._decoder.reader.memory()

    async def load(self, weights: Weights) -> None:
        """Serve ``weights.actor`` from the next decode on; tensors that are the model's own are not copied.

        An empty ``weights.actor`` says that the actor was not trained: only the version moves.

        Raises:
            ModelError: a tensor is missing, unknown or of another shape; the old weights are still served.
        """
        await self._thread.call("load", self._load, weights)

    def _load(self, weights: Weights) -> None:
        if weights.actor:
            adopt(self._model, weights.actor)
        if self._recompute:
            self._decoder.expire()
        self._decoder.version = weights.version

    async def open(self, rollouts: Sequence[Prompt | Response]) -> list[HfDecode]:
        """Make a decode for each; nothing is decoded, and no memory taken, before :meth:`decoding`.

        A response goes on after its tokens, which are read by the model but not from the decode.

        Raises:
            ModelError: a prompt is empty, leaves no room for a response, or holds an id outside of the vocabulary.
        """
        return [HfDecode(self, self._row(rollout)) for rollout in rollouts]

    @asynccontextmanager
    async def decoding(self, live: Sequence[Decode], cut: Cut) -> AsyncIterator[Decoding]:
        """Decode ``live`` while the context is open, until each has ended or ``cut`` answers true.

        The cut is called from the model's thread. Leaving the context stops decoding after the decode step in
        progress; what has not ended is parked.

        Raises:
            ProtocolError: a decode is of another policy, was given up or has failed; or decoding is going on already.
            Exception: whatever ended the decode loop, with a note that names the rollouts.
        """
        decodes = self._resume(live)
        delivery = Delivery(decodes)
        for decode in decodes:
            decode.resume(delivery)
        stop, errors = threading.Event(), list[Exception]()
        async with anyio.create_task_group() as tasks:
            if decodes:
                tasks.start_soon(self._decode, decodes, delivery, cut, stop, errors, name="decode")
            try:
                yield FixedDecoding(type(self._model).__name__)
            except Exception as error:  # noqa: BLE001 - taken out of the task group, which would wrap it in a group
                errors.append(error)
            finally:
                stop.set()
        if errors:
            first, *others = errors
            for other in (leaf for error in others for leaf in leaves(error)):
                if other is not first:  # readers raise the very error of the decode loop
                    first.add_note(f"and then {type(other).__name__}: {other}")
            raise first

    async def _decode(
        self,
        decodes: Sequence[HfDecode],
        delivery: Delivery,
        cut: Cut,
        stop: threading.Event,
        errors: list[Exception],
    ) -> None:
        """Run the decode loop in the model's thread; afterwards no decode is live."""
        rows = [decode.row for decode in decodes]
        failure: Exception | None = None
        try:
            await self._thread.call("decode", self._decoder.run, rows, cut, stop, delivery.deliver)
        except Exception as error:  # noqa: BLE001 - the boundary to the readers: each of them, and the context, raises it
            failure = error
            error.add_note(f"while decoding rollouts {[row.prompt.rollout for row in rows]}")
            errors.append(error)
        finally:
            delivery.show()
            for decode in decodes:
                decode.park(failure)
            self._decoding = False
            given_up = [row for row in rows if row.given_up]
            if given_up:
                await self._forget(given_up)

    async def release(self, decode: HfDecode) -> None:
        """Free the memory of a decode that was given up; the decode loop does so itself for a live one."""
        if not decode.live and not decode.ended:
            await self._forget([decode.row])

    async def _forget(self, rows: Sequence[Row]) -> None:
        with suppress(ModelLost):  # a thread that is gone decodes nothing that could need the memory
            await self._thread.call("forget", self._decoder.forget, rows)

    def _resume(self, live: Sequence[Decode]) -> list[HfDecode]:
        """Return the decodes that have not ended, which are decoded from now on."""
        if self._decoding:
            raise ProtocolError("the policy is decoding already: leave that context before opening another")
        decodes = []
        for decode in live:
            if not isinstance(decode, HfDecode) or not decode.resumable(self):
                raise ProtocolError(
                    f"expected open decodes of this policy, not {decode!r}: it is foreign, given up or failed"
                )
            if not decode.ended:
                decodes.append(decode)
        self._decoding = bool(decodes)
        return decodes

    def _row(self, rollout: Prompt | Response) -> Row:
        """Return a row for a prompt that the model can read, with what there is of its response."""
        response = rollout if isinstance(rollout, Response) else Response.empty(rollout)
        prompt = response.prompt
        length, limit = len(prompt.tokens), self._decoder.reader.max_length
        if not length:
            raise ModelError(f"the prompt of rollout {prompt.rollout} is empty; expected at least one token")
        if length >= limit:
            raise ModelError(
                f"the prompt of rollout {prompt.rollout} has {length} tokens, but {type(self._model).__name__} reads "
                f"at most {limit}, response included: shorten or filter the prompts"
            )
        low, high = int(prompt.tokens.min()), int(prompt.tokens.max())
        if low < 0 or high >= self._vocabulary:
            raise ModelError(
                f"the prompt of rollout {prompt.rollout} holds token id {low if low < 0 else high}, but the vocabulary "
                f"of {type(self._model).__name__} is 0 .. {self._vocabulary - 1}: is it of another tokenizer?"
            )
        longest = min(self._sampling.max_new_tokens, limit - length, self._limit(prompt))
        return Row(next(self._keys), prompt, longest, response.tokens.tolist())
