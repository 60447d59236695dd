"""Incremental prefill of rollouts as they grow: from events to calls of :class:`~oppo.hf.kv.incremental.Incremental`.

::

    Prompt | Chunk | Given  ->  ReadState.unread  ->  spans, batched  ->  keep(span, outputs)

Tokens are read on arrival, in ragged batches. With ``exact`` each rollout is read alone, in blocks on an absolute grid
of its sequence: neither the arrival pattern nor other rollouts can change a bit of the outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.errors import ModelError, ProtocolError
from oppo.events import Chunk, Given, IntArray, Prompt
from oppo.hf.kv.incremental import EXACT_BLOCK, Incremental
from oppo.hf.kv.length_bucketing import cheapest_groups, overhead_on
from oppo.support import Support

TOKENS_PER_PASS = 4096
"""Tokens of a forward pass, padding included: bounds the memory of activations and logits."""


@dataclass(slots=True, eq=False)
class ReadState:
    """One rollout while it grows.

    Attributes:
        prompt: length of the prompt.
        received: tokens received, prompt and response together.
        read: tokens that the model has read.
        unread: int64 [received - read].
        support: of the unread tokens, if outputs are logits: the ids that each was drawn from.
        kept: what the scorer kept of each span.
        tail: [1, D], the output at the last position read, for scorers that need it with the next token.
    """

    rollout: int
    prompt: int
    received: int = 0
    read: int = 0
    unread: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    support: Support = field(default_factory=Support)
    kept: list[Tensor] = field(default_factory=list)
    tail: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpan:
    """Tokens ``start .. end`` of one rollout's sequence, int64 on the model's device, and their support."""

    state: ReadState
    start: int
    tokens: Tensor
    support: Support

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def in_prompt(self) -> bool:
        """Whether it holds no token of the response."""
        return self.end <= self.state.prompt

    @property
    def predictive(self) -> int:
        """Number of last positions that predict response tokens; at least 1, since the last may predict the next."""
        return max(1, self.end - max(self.state.prompt - 1, self.start))


class IncrementalPrefill:
    """Reads rollouts with one model and hands the outputs to a scorer.

    Args:
        name: of the model, for errors.
        vocabulary: upper bound of token ids.
        keep: called with each span and the outputs [k, D] at its last k positions: all of them, or, with
            ``needs_logits``, those that predict the response.
        exact: read each rollout alone, on the grid.
        needs_logits: outputs are logits, computed at the predictive positions only; supports of tokens are kept.
    """

    def __init__(
        self,
        incremental: Incremental,
        *,
        name: str,
        vocabulary: int,
        keep: Callable[[TokenSpan, Tensor], None],
        exact: bool,
        needs_logits: bool = False,
    ) -> None:
        self._incremental = incremental
        self._name = name
        self._vocabulary = vocabulary

        self._keep = keep
        self._exact = exact
        self._needs_logits = needs_logits
        self._states: dict[int, ReadState] = {}

    def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        """Receive the tokens of ``events`` and read them; with ``exact``, the whole blocks.

        Raises:
            ModelError: a token is outside the vocabulary, or a sequence is longer than the model reads.
            ProtocolError: a rollout is opened twice, was never opened, or has a gap.
        """
        grown = {event.rollout: self._received(event) for event in events}
        self._advance(list(grown.values()), final=False)

    def finish(self, lengths: Mapping[int, int]) -> list[ReadState]:
        """Read the rest of finished rollouts and forget them; return their states, in order.

        Args:
            lengths: tokens of each response, by rollout.

        Raises:
            ProtocolError: the tokens received are not the whole response.
        """
        states = []
        for rollout, length in lengths.items():
            state = self._opened(rollout)
            expected = state.prompt + length
            if state.received != expected:
                raise ProtocolError(
                    f"rollout {rollout} finished with {expected} tokens, prompt included, but {self._name} was "
                    f"given {state.received}: extend it by the rest first"
                )
            states.append(state)
        self._advance(states, final=True)
        self.forget([state.rollout for state in states])
        return states

    def rewind(self, rollout: int, length: int) -> int:
        """Take back tokens of a rollout from ``length`` on, prompt included; return how many tokens stay.

        With ``exact`` those are whole blocks, and fewer: a block is read in one pass or not at all. What a scorer kept
        of tokens that are gone is the scorer's to drop.

        Raises:
            ProtocolError: the rollout was never opened.
        """
        state = self._opened(rollout)
        if length >= state.read:
            state.unread = state.unread[: length - state.read]
        else:
            length = length // EXACT_BLOCK * EXACT_BLOCK if self._exact else length
            self._incremental.rewind(rollout, length)
            state.read, state.unread = length, state.unread[:0]
        state.support = state.support.slice(0, len(state.unread))
        state.received = min(length, state.received)
        return state.received

    def forget(self, rollouts: Iterable[int]) -> None:
        """Drop rollouts and their memory; unknown rollouts are fine."""
        rollouts = list(rollouts)
        for rollout in rollouts:
            self._states.pop(rollout, None)
        self._incremental.forget(rollouts)

    def memory(self) -> tuple[int, int]:
        """Return the bytes allocated for keys and values, and the bytes that the tokens read so far need."""
        return self._incremental.memory()

    def _opened(self, rollout: int) -> ReadState:
        state = self._states.get(rollout)
        if state is None:
            raise ProtocolError(f"rollout {rollout} is unknown to {self._name}: its Prompt must come first")
        return state

    def _received(self, event: Prompt | Chunk | Given) -> ReadState:
        if isinstance(event, Prompt):
            if event.rollout in self._states:
                raise ProtocolError(f"rollout {event.rollout} is open in {self._name} already; it came a second time")
            state = ReadState(event.rollout, len(event.tokens))
        else:
            state = self._opened(event.rollout)
            expected = state.received - state.prompt
            if event.start != expected:
                raise ProtocolError(
                    f"rollout {event.rollout}: {self._name} expected tokens from {expected} of the response on, but "
                    f"{type(event).__name__} starts at {event.start}"
                )
        support = event.support if self._needs_logits and isinstance(event, Chunk) else Support()
        self._check(event.rollout, event.tokens, support, state.received)
        state.support = Support.concatenate([(state.support, len(state.unread)), (support, len(event.tokens))])
        state.unread = np.concatenate((state.unread, event.tokens.astype(np.int64)))
        state.received += len(event.tokens)
        self._states[event.rollout] = state
        return state

    def _check(self, rollout: int, tokens: IntArray, support: Support, received: int) -> None:
        length, limit = received + len(tokens), self._incremental.max_length
        if length > limit:
            raise ModelError(
                f"rollout {rollout} has {length} tokens, prompt included, but {self._name} reads at most {limit}: "
                "shorten the prompts or lower max_new_tokens"
            )
        for ids in (tokens, support.ids):
            if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < self._vocabulary:
                raise ModelError(
                    f"rollout {rollout} has token ids from {int(ids.min())} to {int(ids.max())}, but the vocabulary "
                    f"of {self._name} has {self._vocabulary}: policy and scorers must share a tokenizer"
                )

    def _advance(self, states: Sequence[ReadState], *, final: bool) -> None:
        for batch in self._blocks(states, final=final) if self._exact else self._batches(states):
            last = [span.predictive for span in batch] if self._needs_logits else None
            rows, tokens = [span.state.rollout for span in batch], [span.tokens for span in batch]
            for span, outputs in zip(batch, self._incremental.extend(rows, tokens, last=last), strict=True):
                self._keep(span, outputs)

    def _blocks(self, states: Sequence[ReadState], *, final: bool) -> Iterator[list[TokenSpan]]:
        for state in states:
            while len(state.unread) >= EXACT_BLOCK or (final and len(state.unread)):
                yield [self._next_span(state, EXACT_BLOCK)]

    def _batches(self, states: Sequence[ReadState]) -> Iterator[list[TokenSpan]]:
        waiting, overhead = list(states), overhead_on(self._incremental.device)
        while waiting := [state for state in waiting if len(state.unread)]:
            spans = [self._next_span(state, TOKENS_PER_PASS) for state in waiting]
            # A pass computes logits for each span as for the one that needs most: prompts have passes of their own.
            for in_prompt in (True, False):
                alike = [span for span in spans if (self._needs_logits and span.in_prompt) == in_prompt]
                lengths = [len(span.tokens) for span in alike]
                for group in cheapest_groups(lengths, range(len(alike)), overhead=overhead, budget=TOKENS_PER_PASS):
                    yield [alike[at] for at in group]

    def _next_span(self, state: ReadState, limit: int) -> TokenSpan:
        tokens, state.unread = state.unread[:limit], state.unread[limit:]
        support = state.support.slice(0, limit)
        state.support = state.support.slice(limit, len(state.support.counts))
        span = TokenSpan(state, state.read, torch.from_numpy(tokens).to(self._incremental.device), support)
        state.read += len(tokens)
        return span
