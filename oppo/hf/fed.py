"""What a scorer has been fed of the rollouts that are open, so that another can be fed the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from oppo.events import Chunk, Given, IntArray, Prompt


class Fed:
    """The journal (:class:`oppo.placement.Journal`) of a scorer's core: open rollouts with their tokens so far.

    It reads the arguments of the calls themselves: an event adds its tokens to its rollout, and the number of a
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
        for told in (each for argument in args if isinstance(argument, Iterable) for each in argument):
            if isinstance(told, Prompt):
                self._prompts[told.rollout] = told
                self._tokens[told.rollout] = []
            elif isinstance(told, Chunk | Given):
                self._tokens[told.rollout].append(told.tokens)
            elif isinstance(told, int):
                self._prompts.pop(told, None)
                self._tokens.pop(told, None)

    def replay(self) -> Iterator[tuple[Callable[..., object], tuple[Sequence[Prompt | Given]]]]:
        """Return a call with every open prompt, and one with the tokens that followed."""
        if self._prompts:
            yield self._extend, (list(self._prompts.values()),)
        told = [Given(rollout, 0, np.concatenate(pieces)) for rollout, pieces in self._tokens.items() if pieces]
        if told:
            yield self._extend, (told,)
