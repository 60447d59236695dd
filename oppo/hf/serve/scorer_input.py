"""Events for a scorer: how they cross to another process, and the journal from which a new process gets them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from oppo.events import Chunk, Given, Prompt
from oppo.support import Support

ScorerEvent: TypeAlias = Prompt | Chunk | Given
"""An event that a scorer reads."""


@dataclass(frozen=True, slots=True, eq=False)
class ScorerInput:
    """Events for a scorer, those of each rollout in order.

    Pickled, they are reduced to what a scorer reads of them, token ids. The log-probs and versions of a chunk arrive as
    0, and of a prompt's columns only those that are named.

    Attributes:
        supports: whether the supports of tokens cross.
        columns: the columns of prompts that cross.
    """

    events: Sequence[ScorerEvent]
    supports: bool = False
    columns: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        packed = [_packed(event, supports=self.supports, columns=self.columns) for event in self.events]
        return _unpacked, (packed,)


_Packed: TypeAlias = tuple[type[ScorerEvent], int, int, Mapping[str, object], bytes, bytes, bytes]
"""Kind, rollout, start and columns of an event; its tokens, the ids of their support and the counts, each int32."""


def _packed(event: ScorerEvent, *, supports: bool, columns: Sequence[str]) -> _Packed:
    start = 0 if isinstance(event, Prompt) else event.start
    given = event.columns if isinstance(event, Prompt) else {}
    held = {name: given[name] for name in columns if name in given}
    support = event.support if supports and isinstance(event, Chunk) else Support()
    tokens, ids, counts = (
        array.astype(np.int32, copy=False).tobytes() for array in (event.tokens, support.ids, support.counts)
    )
    return type(event), event.rollout, start, held, tokens, ids, counts


def _unpacked(packed: Sequence[_Packed]) -> ScorerInput:
    events: list[ScorerEvent] = []
    for kind, rollout, start, columns, *buffers in packed:
        tokens, ids, counts = (np.frombuffer(buffer, np.int32) for buffer in buffers)
        if kind is Prompt:
            events.append(Prompt(rollout, rollout, tokens, columns=columns))
        elif kind is Given:
            events.append(Given(rollout, start, tokens))
        else:
            logprobs, versions = np.zeros(len(tokens), np.float32), np.zeros(len(tokens), np.int32)
            events.append(Chunk(rollout, start, tokens, logprobs, versions, Support(ids, counts)))
    return ScorerInput(events)


class ReplayJournal:
    """The journal (:class:`oppo.placement.Journal`) of a scorer's worker: the events of the open rollouts.

    It reads the arguments of the calls: a :class:`ScorerInput` extends its rollouts, and the number of a rollout, an
    argument of ``finish`` and ``forget``, closes that rollout.

    Args:
        extend: the worker's method that reads a ScorerInput; a replay calls it.
        columns: the columns of prompts that it reads.
    """

    def __init__(self, extend: Callable[..., None], columns: tuple[str, ...] = ()) -> None:
        self._extend = extend
        self._columns = columns
        self._events: dict[int, list[ScorerEvent]] = {}

    def note(self, work: Callable[..., object], args: tuple[object, ...]) -> None:
        """Record a call that was answered."""
        del work
        for argument in args:
            if isinstance(argument, ScorerInput):
                for event in argument.events:
                    if isinstance(event, Prompt):
                        self._events[event.rollout] = []
                    self._events[event.rollout].append(event)
            elif isinstance(argument, Mapping | Sequence):
                for rollout in argument:
                    self._events.pop(rollout, None)

    def replay(self) -> Iterator[tuple[Callable[..., object], tuple[object, ...]]]:
        """Return one call with the events of all open rollouts."""
        events = [event for rollout in self._events.values() for event in rollout]
        yield self._extend, (ScorerInput(events, supports=True, columns=self._columns),)
