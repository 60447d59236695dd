"""What a scorer is fed: how it crosses to another process, and what is remembered of it so that it can be fed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np

from oppo.events import Chunk, Given, IntArray, Prompt
from oppo.support import Support

Kind: TypeAlias = Literal["prompt", "chunk", "given"]


@dataclass(frozen=True, slots=True, eq=False)
class ScorerInput:
    """Events for a scorer, those of each rollout in order.

    Pickled they are what a scorer reads of them: token ids, in one array. Other columns of the data do not cross, and
    the log-probs and versions of a chunk are 0 then.

    Attributes:
        supports: whether the supports of tokens cross.
    """

    events: Sequence[Prompt | Chunk | Given]
    supports: bool = False

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        support = Support.concatenate(
            (event.support if self.supports and isinstance(event, Chunk) else Support(), len(event.tokens))
            for event in self.events
        )
        tokens = [event.tokens for event in self.events]
        flat = [np.concatenate(tokens) if tokens else np.zeros(0, np.int32), support.ids, support.counts]
        heads = [_head(event) for event in self.events]
        return _unfolded, (heads, *(array.astype(np.int32, copy=False).tobytes() for array in flat))


def _head(event: Prompt | Chunk | Given) -> tuple[Kind, int, int, int]:
    """Return kind, rollout, start and number of tokens."""
    if isinstance(event, Prompt):
        return "prompt", event.rollout, 0, len(event.tokens)
    kind: Kind = "chunk" if isinstance(event, Chunk) else "given"
    return kind, event.rollout, event.start, len(event.tokens)


def _unfolded(heads: Sequence[tuple[Kind, int, int, int]], tokens: bytes, ids: bytes, counts: bytes) -> ScorerInput:
    flat: IntArray = np.frombuffer(tokens, np.int32)
    support = Support(np.frombuffer(ids, np.int32), np.frombuffer(counts, np.int32))
    events: list[Prompt | Chunk | Given] = []
    end = 0
    for kind, rollout, start, count in heads:
        begin, end = end, end + count
        piece = flat[begin:end]
        if kind == "prompt":
            events.append(Prompt(rollout, rollout, piece))
        elif kind == "given":
            events.append(Given(rollout, start, piece))
        else:
            events.append(_chunk(rollout, start, piece, support.slice(begin, end)))
    return ScorerInput(events)


def _chunk(rollout: int, start: int, tokens: IntArray, support: Support) -> Chunk:
    n = len(tokens)
    return Chunk(rollout, start, tokens, np.zeros(n, np.float32), np.zeros(n, np.int32), support)


class ReplayJournal:
    """The journal (:class:`oppo.placement.Journal`) of a scorer's worker: open rollouts with their tokens so far.

    It reads the arguments of the calls themselves: a :class:`ScorerInput` adds tokens to its rollouts, and the number
    of a rollout, as ``finish`` and ``forget`` are given it, closes that rollout.

    Args:
        extend: feeds a worker; what is replayed are calls of it.
        supports: whether it needs the supports of tokens.
    """

    def __init__(self, extend: Callable[..., None], *, supports: bool = False) -> None:
        self._extend = extend
        self._supports = supports
        self._prompts: dict[int, Prompt] = {}
        self._pieces: dict[int, list[Chunk | Given]] = {}

    def note(self, work: Callable[..., object], args: tuple[object, ...]) -> None:
        """Keep what the rollouts named in ``args`` have come to."""
        del work
        for argument in args:
            if isinstance(argument, ScorerInput):
                self._add(argument)
            elif isinstance(argument, Mapping | Sequence):
                self._close(argument)

    def replay(self) -> Iterator[tuple[Callable[..., object], tuple[object, ...]]]:
        """Return a call with every open prompt and the tokens that followed."""
        followed = [_joined(rollout, pieces) for rollout, pieces in self._pieces.items() if pieces]
        yield self._extend, (ScorerInput([*self._prompts.values(), *followed], supports=self._supports),)

    def _add(self, feed: ScorerInput) -> None:
        for event in feed.events:
            if isinstance(event, Prompt):
                self._prompts[event.rollout] = event
                self._pieces[event.rollout] = []
            else:
                self._pieces[event.rollout].append(event)

    def _close(self, rollouts: Iterable[object]) -> None:
        for rollout in rollouts:
            if isinstance(rollout, int):
                self._prompts.pop(rollout, None)
                self._pieces.pop(rollout, None)


def _joined(rollout: int, pieces: Sequence[Chunk | Given]) -> Chunk:
    support = Support.concatenate(
        (piece.support if isinstance(piece, Chunk) else Support(), len(piece.tokens)) for piece in pieces
    )
    return _chunk(rollout, 0, np.concatenate([piece.tokens for piece in pieces]), support)
