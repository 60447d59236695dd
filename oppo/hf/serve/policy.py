"""The policy on transformers: the decode loop where the model lives, its readers on the event loop."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

import anyio
import anyio.lowlevel
import numpy as np

from oppo.errors import ModelError, ModelLost, ProtocolError, leaves
from oppo.events import Prompt, Response
from oppo.hf.introspection import longest, vocabulary
from oppo.hf.serve.decoding import DecodeRow
from oppo.hf.serve.mailbox import Mailbox
from oppo.hf.serve.policy_core import PolicyCore
from oppo.hf.serve.signals import Counters, Signals
from oppo.models import Capabilities, Cut, Decode, Decoding, FixedDecoding, Piece, PieceState, Sampling, Weights
from oppo.numeric import require_whole
from oppo.placement import Callback, Hosting
from oppo.support import Support

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HfDecode:
    """One rollout of a :class:`HfPolicy`: its tokens wait here until they are read.

    Lives on the event loop. Readers use ``read`` and ``aclose``; the other methods are the policy's.
    """

    def __init__(self, policy: HfPolicy, row: DecodeRow) -> None:
        self.prompt = row.prompt
        self.key = row.key
        self.enough = 0
        self.given_up = False
        self._policy = policy
        self._row: DecodeRow | None = row
        self._mailbox: Mailbox | None = None
        self._give_up: Callable[[], None] = _nothing
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

    @property
    def made(self) -> int:
        """How many tokens of the response can be read or have been."""
        return self._taken + len(self._unread)

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
            raise ProtocolError(f"two reads of rollout {self.prompt.rollout} at once: it has one reader")
        self._wanted, self.enough = limit, self._taken + limit
        if self._mailbox is not None:
            self._mailbox.show()
        while not self._readable():
            self._news = anyio.Event()
            try:
                await self._news.wait()
            finally:
                self._news = None
        return self._take(limit)

    async def aclose(self) -> None:
        """Give up the rollout and its memory; idempotent. While it is decoded, the memory goes at the next step."""
        if self.given_up:
            return
        self.given_up = True
        self._give_up()
        self._wake()
        await self._policy.release(self)

    def resumable(self, policy: HfPolicy) -> bool:
        """Whether ``policy`` may decode it."""
        return self._policy is policy and not self.given_up and self._failure is None

    def resume(self, mailbox: Mailbox, give_up: Callable[[], None]) -> None:
        """Take note that decoding (re)starts, by whom its tokens come, and how to tell that nobody wants them."""
        self._state, self._mailbox, self._give_up = "live", mailbox, give_up

    def handed_over(self) -> list[DecodeRow]:
        """Return its row, which is the decode loop's from now on; none after the first time."""
        row, self._row = self._row, None
        return [] if row is None else [row]

    def put(self, token: int, logprob: float, version: int, support: Support, state: PieceState) -> None:
        """Append a token to what can be read."""
        self._unread.append((token, logprob, version, support))
        self._state = state
        if self._readable():
            self._wake()

    def park(self, failure: Exception | None) -> None:
        """Take note that decoding is over: parked if it was live, for good if it failed."""
        self._mailbox, self._give_up = None, _nothing
        if self.live:
            self._state, self._failure = "cut", failure
            self._wake()

    def _readable(self) -> bool:
        return not self.live or self.given_up or len(self._unread) >= self._wanted

    def _wake(self) -> None:
        if self._news is not None:
            self._news.set()

    def _take(self, limit: int) -> Piece:
        rollout = self.prompt.rollout
        if self.given_up:
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


def _nothing() -> None:
    """Tell nobody: nothing is decoded."""


class HfPolicy:
    """A causal language model of transformers as :class:`oppo.models.Policy`.

    The tokens of a rollout depend on the weights, its prompt and the sampling settings; up to near-ties they do not
    depend on what else is decoded beside it, and never on how they are read.

    Args:
        model: a causal LM; put into evaluation mode for good.
        sampling: how tokens are drawn.
        thread: where the model lives: a thread, or a process without ``restarts``, as rows are lost with it.
        on_publish: what becomes of the keys and values of parked rollouts when weights are loaded. ``recompute``: their
            tokens are read again before they go on, as if the new weights had written them all. ``keep``: they go on
            as they are, cheaper but a mixture of versions.
        exact: read prompts row by row on a fixed grid; then runs in which the same rollouts are decoded together
            agree bit for bit (float32 on a CPU).
        prefill_tokens: how many tokens, padding included, are read between two decode steps, so that a long prompt
            holds nobody up; with ``exact`` all are read at once.
        decode: gives the text of tokens; needed for ``sampling.stop_strings``, and called where the model
            lives: for a process it must be picklable, as :meth:`oppo.hf.text.Text.decode` is.
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
        thread: Hosting,
        on_publish: Literal["recompute", "keep"] = "recompute",
        exact: bool = False,
        prefill_tokens: int = 2048,
        decode: Callable[[Sequence[int]], str] | None = None,
        limit: Callable[[Prompt], int] | None = None,
    ) -> None:
        require_whole("prefill_tokens", prefill_tokens, 1)
        self._name = type(model).__name__
        self._sampling = sampling
        self._limit = limit or (lambda prompt: sampling.max_new_tokens)
        self._longest = longest(model)
        self._vocabulary = vocabulary(model)
        self._keys = itertools.count()
        self._decoding = False
        worker = PolicyCore(
            model,
            sampling=sampling,
            exact=exact,
            prefill_tokens=prefill_tokens,
            recompute=on_publish == "recompute",
            decode=decode,
        )
        self._counters = worker.counters
        self._worker = thread.host(worker)

    @property
    def version(self) -> int:
        """Version of the weights in use."""
        return self._counters.version

    @property
    def capabilities(self) -> Capabilities:
        """What it can do: weights that come while something is decoded wait for the end of that."""
        return Capabilities(loads_while_decoding="when decoding ends")

    @property
    def counters(self) -> Counters:
        """Decode steps, tokens made and tokens prefilled so far, also while it decodes."""
        return self._counters

    async def memory(self) -> tuple[int, int]:
        """Return the bytes allocated for keys and values, and those that the tokens read so far need.

        While something is decoded, it waits for the end of that.
        """
        return await self._worker.call("memory", PolicyCore.memory)

    async def load(self, weights: Weights) -> None:
        """Serve ``weights.actor`` from the next decode on; tensors that are the model's own are not copied.

        An empty ``weights.actor`` says that the actor was not trained: only the version moves. No tensor crosses to
        another process: this one writes the memory that both see, in the policy's turn.

        Raises:
            ModelError: a tensor is missing, unknown or of another shape; the old weights are still served.
        """
        await self._worker.call_local("load", PolicyCore.load, weights)
        await self._worker.call("refresh", PolicyCore.refresh)

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

        The cut is called from the thread in which the model works, or from the one that waits for its process. Leaving
        the context stops decoding after the decode step in progress; what has not ended is parked.

        Raises:
            ProtocolError: a decode is of another policy, was given up or has failed; or decoding is going on already.
            Exception: whatever ended the decode loop, with a note that names the rollouts.
        """
        decodes = self._resume(live)
        mailbox, signals, errors = Mailbox(decodes), Signals.of(len(decodes)), list[Exception]()
        for at, decode in enumerate(decodes):
            decode.resume(mailbox, partial(signals.give_up, at))
        async with anyio.create_task_group() as tasks:
            if decodes:
                tasks.start_soon(self._decode, decodes, mailbox, cut, signals, errors, name="decode")
            try:
                yield FixedDecoding(self._name)
            except Exception as error:  # noqa: BLE001 - taken out of the task group, which would wrap it in a group
                errors.append(error)
            finally:
                signals.stop()
        if errors:
            first, *others = errors
            for other in (leaf for error in others for leaf in leaves(error)):
                if other is not first:  # readers raise the very error of the decode loop
                    first.add_note(f"and then {type(other).__name__}: {other}")
            raise first

    async def _decode(
        self,
        decodes: Sequence[HfDecode],
        mailbox: Mailbox,
        cut: Cut,
        signals: Signals,
        errors: list[Exception],
    ) -> None:
        """Run the decode loop where the model lives; afterwards no decode is live."""
        new = [row for decode in decodes for row in decode.handed_over()]
        keys = [decode.key for decode in decodes]
        told, made = Callback(cut), Callback(mailbox.deliver, oneway=True)
        failure: Exception | None = None
        try:
            await self._worker.call("decode", PolicyCore.run, new, keys, told, signals, made)
        except Exception as error:  # noqa: BLE001 - the boundary to the readers: each of them, and the context, raises it
            failure = error
            error.add_note(f"while decoding rollouts {[decode.prompt.rollout for decode in decodes]}")
            errors.append(error)
        finally:
            mailbox.show()
            for decode in decodes:
                decode.park(failure)
            self._decoding = False
            given_up = [decode.key for decode in decodes if decode.given_up]
            if given_up:
                await self._forget(given_up)

    async def release(self, decode: HfDecode) -> None:
        """Free the memory of a decode that was given up; the decode loop does so itself for a live one."""
        if not decode.live and not decode.ended:
            await self._forget([decode.key])

    async def _forget(self, keys: Sequence[int]) -> None:
        with suppress(ModelLost):  # the memory is lost with the place it was in
            await self._worker.call("forget", PolicyCore.forget, keys)

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

    def _row(self, rollout: Prompt | Response) -> DecodeRow:
        """Return a row for a prompt that the model can read, with what there is of its response."""
        response = rollout if isinstance(rollout, Response) else Response.empty(rollout)
        prompt = response.prompt
        length, limit = len(prompt.tokens), self._longest
        if not length:
            raise ModelError(f"the prompt of rollout {prompt.rollout} is empty; expected at least one token")
        if length >= limit:
            raise ModelError(
                f"the prompt of rollout {prompt.rollout} has {length} tokens, but {self._name} reads "
                f"at most {limit}, response included: shorten or filter the prompts"
            )
        low, high = int(prompt.tokens.min()), int(prompt.tokens.max())
        if low < 0 or high >= self._vocabulary:
            raise ModelError(
                f"the prompt of rollout {prompt.rollout} holds token id {low if low < 0 else high}, but the vocabulary "
                f"of {self._name} is 0 .. {self._vocabulary - 1}: is it of another tokenizer?"
            )
        most = min(self._sampling.max_new_tokens, limit - length, self._limit(prompt))
        return DecodeRow(next(self._keys), replace(prompt, columns={}), most, response.tokens.tolist())
