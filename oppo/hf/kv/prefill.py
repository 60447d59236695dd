"""Rollouts that grow, read as their tokens arrive.

::

    Prompt | Chunk | ToolTokens  ->  ReadState.unread  ->  spans, batched  ->  keep(span, outputs)

Tokens are read on arrival, in ragged batches; by a model that cannot continue a sequence
(:class:`~oppo.hf.kv.reader.WholeRows`), when the rollout has ended. With ``deterministic`` each rollout is read alone,
in blocks on an absolute grid of its sequence: neither the arrival pattern nor other rollouts can change a bit of the
outputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.events import NO_COLUMNS, Chunk, Prompt, TokenColumns, ToolTokens
from oppo.hf.kv.reader import Incremental, Reader, WholeRows
from oppo.scorers import RolloutSession, RolloutSessions

EXACT_BLOCK = 32
"""In deterministic mode rows are read alone, in blocks from multiples of this: bits then depend on that row only."""

TOKENS_PER_PASS = 4096  # tokens of a forward pass, padding included: bounds the memory of activations and logits


@dataclass(slots=True, eq=False)
class ReadState(RolloutSession):
    read: int = 0  # tokens that the model has read
    unread: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    extra: TokenColumns = NO_COLUMNS  # of the unread tokens, if outputs predict tokens
    kept: list[Tensor] = field(default_factory=list)  # of each span
    steps: list[Tensor] = field(default_factory=list)  # which of the kept tokens end a step, bool [n] on the CPU
    tail: Tensor | None = None  # [1, D], the output at the last position read


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpan:
    """Tokens ``start .. end`` of one rollout's sequence, int64 on the CPU, and their further columns."""

    state: ReadState
    start: int
    tokens: Tensor
    extra: TokenColumns

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def in_prompt(self) -> bool:
        return self.end <= self.state.prompt

    @property
    def predictive(self) -> int:
        """Number of last positions that predict response tokens; at least 1, since the last may predict the next."""
        return max(1, self.end - max(self.state.prompt - 1, self.start))


class IncrementalPrefill:
    # `keep` gets the spans of a pass, and their outputs [k, D] at the last k positions: all or, if `predictive`, those
    # that predict the response. If `deterministic`, each rollout is read alone, on the grid. WholeRows read it when it
    # is finished, in one span.

    def __init__(
        self,
        reader: Reader,
        *,
        name: str,
        vocabulary: int,
        keep: Callable[[Sequence[TokenSpan], Sequence[Tensor]], None],
        deterministic: bool,
        predictive: bool = False,
    ) -> None:
        self._reader = reader
        self._whole = isinstance(reader, WholeRows)
        self._keep = keep
        self._deterministic = deterministic
        self._predictive = predictive
        self._states = RolloutSessions(
            name,
            lambda prompt: ReadState(prompt.rollout, len(prompt.tokens)),
            vocabulary=vocabulary,
            longest=reader.max_length,
        )

    def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None:
        grown = {event.rollout: self._received(event) for event in events}
        self._advance(list(grown.values()), final=False)

    def finish(self, lengths: Mapping[int, int]) -> list[ReadState]:
        states = [self._states.whole(rollout, length) for rollout, length in lengths.items()]
        self._advance(states, final=True)
        self.forget([state.rollout for state in states])
        return states

    def rewind(self, rollout: int, length: int) -> int:
        """Take back tokens of a rollout from ``length`` on, prompt included; return how many tokens stay."""
        # If `deterministic` those are whole blocks, and fewer: a block is read in one pass or not at all. What a scorer
        # kept of tokens that are gone is the scorer's to drop.
        state = self._states[rollout]
        if length >= state.read:
            state.unread = state.unread[: length - state.read]
        else:
            length = length // EXACT_BLOCK * EXACT_BLOCK if self._deterministic else length
            length = self._reader.rewind(rollout, length)
            state.read, state.unread = length, state.unread[:0]
        state.extra = state.extra.slice(0, len(state.unread))
        state.received = min(length, state.received)
        return state.received

    def forget(self, rollouts: Iterable[int]) -> None:
        rollouts = list(rollouts)
        self._states.forget(rollouts)
        self._reader.forget(rollouts)

    def tail(self, rollout: int) -> Tensor | None:
        return self._states[rollout].tail

    def hold(self, lengths: Mapping[int, int], tail: Tensor | None) -> None:
        # For counts of memory: with prompts that long, as if they had been read, and outputs like `tail` at their ends.
        for rollout, length in lengths.items():
            end = None if tail is None else tail.clone()
            self._states[rollout] = ReadState(rollout, length, received=length, read=length, tail=end)
        if isinstance(self._reader, Incremental):
            self._reader.hold(lengths)

    def memory(self) -> tuple[int, int]:
        return self._reader.memory()

    def layer_bytes(self) -> Mapping[int, int]:
        return self._reader.layer_bytes()

    def _received(self, event: Prompt | Chunk | ToolTokens) -> ReadState:
        extra = event.extra if self._predictive and isinstance(event, Chunk) else NO_COLUMNS
        state = self._states.receive(event, extra)
        if isinstance(event, Prompt) and event.images:
            self._reader.show(event.rollout, event.tokens, event.images)
        state.extra = TokenColumns.concatenate([(state.extra, len(state.unread)), (extra, len(event.tokens))])
        state.unread = np.concatenate((state.unread, event.tokens.astype(np.int64)))
        return state

    def _advance(self, states: Sequence[ReadState], *, final: bool) -> None:
        if self._whole and not final:
            return
        self._reader.expect(state.rollout for state in states)
        for batch in self._blocks(states, final=final) if self._deterministic else self._batches(states):
            last = [span.predictive for span in batch] if self._predictive else None
            rows, tokens = [span.state.rollout for span in batch], [span.tokens for span in batch]
            self._keep(batch, self._reader.extend(rows, tokens, last=last))

    def _blocks(self, states: Sequence[ReadState], *, final: bool) -> Iterator[list[TokenSpan]]:
        for state in states:
            while len(state.unread) >= (size := self._cut(state, EXACT_BLOCK)) or (final and len(state.unread)):
                yield [self._next_span(state, len(state.unread) if self._whole else size)]

    def _cut(self, state: ReadState, limit: int) -> int:
        return limit if isinstance(self._reader, WholeRows) else self._reader.cut(state.rollout, state.read, limit)

    def _batches(self, states: Sequence[ReadState]) -> Iterator[list[TokenSpan]]:
        waiting = list(states)
        while waiting := [state for state in waiting if len(state.unread)]:
            spans = [self._next_span(state, self._most(state)) for state in waiting]
            rows, lengths = [span.state.rollout for span in spans], [len(span.tokens) for span in spans]
            for group in self._reader.groups(rows, lengths, TOKENS_PER_PASS):
                yield [spans[at] for at in group]

    def _most(self, state: ReadState) -> int:
        least = min(len(state.unread), math.inf if self._whole else TOKENS_PER_PASS)
        return self._cut(state, int(least))

    def _next_span(self, state: ReadState, limit: int) -> TokenSpan:
        tokens, state.unread = state.unread[:limit], state.unread[limit:]
        extra, state.extra = state.extra.slice(0, limit), state.extra.slice(limit, None)
        span = TokenSpan(state, state.read, torch.from_numpy(tokens), extra)
        state.read += len(tokens)
        return span
