"""Reading rollouts as they grow: from events to calls of :class:`~oppo.hf.kv.incremental.Incremental`.

::

    Prompt | Chunk | Given  ->  session.unread  ->  spans, batched  ->  keep(span, outputs)

Otherwise at once, in ragged batches; with ``exact`` each rollout alone, in blocks on an absolute grid of its sequence,
so that neither the arrival pattern nor other rollouts can change a bit of the outputs.
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
from oppo.hf.kv.incremental import Incremental
from oppo.hf.kv.length_bucketing import cheapest_groups, overhead_on
from oppo.support import Support

GRID = 32
"""Tokens in a block of the exact mode."""

TOKENS_PER_PASS = 4096
"""A forward pass reads at most so many tokens, padding included: bounds the activations and the logits."""


@dataclass(slots=True, eq=False)
class ReadState:
    """What is known of one rollout while it grows.

    Attributes:
        prompt: length of the prompt.
        received: tokens received, prompt and response together.
        read: tokens that the model has read.
        unread: int64 [received - read].
        support: of the unread tokens, where outputs are logits: the ids that each was drawn from.
        kept: what the scorer noted of each span.
        tail: [1, D], the output at the last position read, where the scorer needs it for the next token.
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

    session: ReadState
    start: int
    tokens: Tensor
    support: Support

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)

    @property
    def in_prompt(self) -> bool:
        """Whether no token of the response is in it."""
        return self.end <= self.session.prompt

    @property
    def informative(self) -> int:
        """How many of its last positions tell something of the response: predict a token of it, or will be asked to."""
        return max(1, self.end - max(self.session.prompt - 1, self.start))


class IncrementalPrefill:
    """Reads rollouts with one model and tells a scorer what came out.

    Args:
        incremental: the model.
        name: the model's, for errors.
        vocabulary: token ids must be smaller.
        device: where the model is.
        keep: called with each span and the outputs [k, D] at its last k positions: all of them, or, with
            ``needs_logits``, those that are informative about the response.
        exact: each rollout alone, on the grid.
        needs_logits: outputs are logits, which are computed only where they are needed; the supports of tokens are
            kept for them.
    """

    def __init__(
        self,
        incremental: Incremental,
        *,
        name: str,
        vocabulary: int,
        device: torch.device,
        keep: Callable[[TokenSpan, Tensor], None],
        exact: bool,
        needs_logits: bool = False,
    ) -> None:
        self._incremental = incremental
        self._name = name
        self._vocabulary = vocabulary
        self._device = device
        self._keep = keep
        self._exact = exact
        self._needs_logits = needs_logits
        self._sessions: dict[int, ReadState] = {}

    def extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        """Take the tokens of ``events`` and read what can be read now.

        Raises:
            ModelError: a token is outside the vocabulary, or a sequence longer than the model reads.
            ProtocolError: a rollout is opened twice, was never opened, or has a gap.
        """
        grown = {event.rollout: self._received(event) for event in events}
        self._advance(list(grown.values()), final=False)

    def finish(self, lengths: Mapping[int, int]) -> list[ReadState]:
        """Read what is left of finished rollouts; return their sessions, in order, which are forgotten here.

        Args:
            lengths: how many tokens each response has, by rollout.

        Raises:
            ProtocolError: the tokens received are not the whole response.
        """
        sessions = []
        for rollout, length in lengths.items():
            session = self._known(rollout)
            expected = session.prompt + length
            if session.received != expected:
                raise ProtocolError(
                    f"rollout {rollout} finished with {expected} tokens, prompt included, but {self._name} was "
                    f"given {session.received}: extend it by the rest first"
                )
            sessions.append(session)
        self._advance(sessions, final=True)
        self.forget([session.rollout for session in sessions])
        return sessions

    def forget(self, rollouts: Iterable[int]) -> None:
        """Drop sessions and their memory; unknown rollouts are fine."""
        rollouts = list(rollouts)
        for rollout in rollouts:
            self._sessions.pop(rollout, None)
        self._incremental.forget(rollouts)

    def _known(self, rollout: int) -> ReadState:
        session = self._sessions.get(rollout)
        if session is None:
            raise ProtocolError(f"rollout {rollout} is unknown to {self._name}: its Prompt must come first")
        return session

    def _received(self, event: Prompt | Chunk | Given) -> ReadState:
        if isinstance(event, Prompt):
            if event.rollout in self._sessions:
                raise ProtocolError(f"rollout {event.rollout} is open in {self._name} already; it came a second time")
            session = ReadState(event.rollout, len(event.tokens))
        else:
            session = self._known(event.rollout)
            expected = session.received - session.prompt
            if event.start != expected:
                raise ProtocolError(
                    f"rollout {event.rollout}: {self._name} expected tokens from {expected} of the response on, but "
                    f"{type(event).__name__} starts at {event.start}"
                )
        support = event.support if self._needs_logits and isinstance(event, Chunk) else Support()
        self._check(event.rollout, event.tokens, support, session.received)
        session.support = Support.concatenate([(session.support, len(session.unread)), (support, len(event.tokens))])
        session.unread = np.concatenate((session.unread, event.tokens.astype(np.int64)))
        session.received += len(event.tokens)
        self._sessions[event.rollout] = session
        return session

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

    def _advance(self, sessions: Sequence[ReadState], *, final: bool) -> None:
        for batch in self._alone(sessions, final=final) if self._exact else self._together(sessions):
            last = [span.informative for span in batch] if self._needs_logits else None
            rows, tokens = [span.session.rollout for span in batch], [span.tokens for span in batch]
            for span, outputs in zip(batch, self._incremental.extend(rows, tokens, last=last), strict=True):
                self._keep(span, outputs)

    def _alone(self, sessions: Sequence[ReadState], *, final: bool) -> Iterator[list[TokenSpan]]:
        for session in sessions:
            while len(session.unread) >= GRID or (final and len(session.unread)):
                yield [self._taken(session, GRID)]

    def _together(self, sessions: Sequence[ReadState]) -> Iterator[list[TokenSpan]]:
        waiting = list(sessions)
        while waiting := [session for session in waiting if len(session.unread)]:
            spans = [self._taken(session, TOKENS_PER_PASS) for session in waiting]
            for alike in self._alike(spans):
                lengths = [len(span.tokens) for span in alike]
                overhead = overhead_on(self._device)
                for group in cheapest_groups(lengths, range(len(alike)), overhead=overhead, budget=TOKENS_PER_PASS):
                    yield [alike[at] for at in group]

    def _alike(self, spans: list[TokenSpan]) -> list[list[TokenSpan]]:
        """Return spans that may share a pass: outputs are computed for each as for the one that needs most."""
        if not self._needs_logits:
            return [spans]
        return [[span for span in spans if span.in_prompt == silent] for silent in (True, False)]

    def _taken(self, session: ReadState, limit: int) -> TokenSpan:
        tokens, session.unread = session.unread[:limit], session.unread[limit:]
        support = session.support.slice(0, limit)
        session.support = session.support.slice(limit, len(session.support.counts))
        span = TokenSpan(session, session.read, torch.from_numpy(tokens).to(self._device), support)
        session.read += len(tokens)
        return span
