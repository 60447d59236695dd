"""What a scorer is fed: how it crosses to another process, and what is remembered of it so that it can be fed again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oppo.events import Chunk, Given, IntArray, Prompt

_PROMPT = -1
"""In the place of a start: this is no part of a response."""


@dataclass(frozen=True, slots=True, eq=False)
class Feed:
    """Events for a scorer, at most one for each rollout.

    Pickled they are what a scorer reads of them: token ids, in one array. An event is then ``Prompt`` or ``Given``,
    and of its rollout's data no other column is left.
    """

    events: Sequence[Prompt | Chunk | Given]

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        heads = [
            (event.rollout, _PROMPT if isinstance(event, Prompt) else event.start, len(event.tokens))
            for event in self.events
        ]
        tokens = np.concatenate([event.tokens for event in self.events]) if heads else np.zeros(0, np.int32)
        return _unfolded, (heads, tokens.astype(np.int32, copy=False).tobytes())


def _unfolded(heads: Sequence[tuple[int, int, int]], tokens: bytes) -> Feed:
    flat: IntArray = np.frombuffer(tokens, np.int32)
    events: list[Prompt | Given] = []
    end = 0
    for rollout, start, count in heads:
        piece, end = flat[end : end + count], end + count
        events.append(Prompt(rollout, rollout, piece) if start == _PROMPT else Given(rollout, start, piece))
    return Feed(events)


class Fed:
    """The journal (:class:`oppo.placement.Journal`) of a scorer's core: open rollouts with their tokens so far.

    It reads the arguments of the calls themselves: a :class:`Feed` adds tokens to its rollouts, and the number of a
    rollout, as ``finish`` and ``forget`` are given it, closes that rollout.

    Args:
        extend: feeds a core; what is replayed are calls of it.
    """

    def __init__(self, extend: Callable[..., None]) -> None:
        self._extend = extend
        self._prompts: dict[int, Prompt] = {}
        self._tokens: dict[int, list[IntArray]] = {}

    def note(self, work: Callable[..., object], args: tuple[object, ...]) -> None:
        """Keep what the rollouts named in ``args`` have come to."""
        del work
        for argument in args:
            if isinstance(argument, Feed):
                self._add(argument)
            elif isinstance(argument, Mapping | Sequence):
                self._close(argument)

    def replay(self) -> Iterator[tuple[Callable[..., object], tuple[object, ...]]]:
        """Return a call with every open prompt, and one with the tokens that followed."""
        yield self._extend, (Feed(list(self._prompts.values())),)
        followed = [Given(rollout, 0, np.concatenate(pieces)) for rollout, pieces in self._tokens.items() if pieces]
        yield self._extend, (Feed(followed),)

    def _add(self, feed: Feed) -> None:
        for event in feed.events:
            if isinstance(event, Prompt):
                self._prompts[event.rollout] = event
                self._tokens[event.rollout] = []
            else:
                self._tokens[event.rollout].append(event.tokens)

    def _close(self, rollouts: Iterable[object]) -> None:
        for rollout in rollouts:
            if isinstance(rollout, int):
                self._prompts.pop(rollout, None)
                self._tokens.pop(rollout, None)
