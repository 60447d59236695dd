"""A scorer's backlog: the events of a step that it has still to handle, the urgent ones apart."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import anyio

from oppo.events import Chunk, Defer, Drop, Finish, Given, Prompt, RolloutEvent

Growth: TypeAlias = Prompt | Chunk | Given
"""An event that a scorer reads."""


@dataclass(slots=True)
class Outcomes:
    """The rollouts that have finished, were dropped or were deferred.

    Attributes:
        unread: events of the finished rollouts that have still to be read.
    """

    finished: list[Finish] = field(default_factory=list)
    dropped: list[Drop] = field(default_factory=list)
    deferred: list[Defer] = field(default_factory=list)
    unread: list[Growth] = field(default_factory=list)


@dataclass(eq=False)
class Backlog:
    """Collects the events of a step as they come; returns outcomes at once, and unread events in portions."""

    _outcomes: Outcomes = field(default_factory=Outcomes)
    _unread: dict[int, list[Growth]] = field(default_factory=dict)
    _ended: bool = False
    _change: anyio.Event = field(default_factory=anyio.Event)

    def add(self, events: Iterable[RolloutEvent]) -> None:
        """Add events."""
        for event in events:
            match event:
                case Finish():
                    self._outcomes.finished.append(event)
                case Drop():
                    self._outcomes.dropped.append(event)
                case Defer():
                    self._outcomes.deferred.append(event)
                case _:
                    self._unread.setdefault(event.rollout, []).append(event)
        self._change.set()

    def end(self) -> None:
        """Note that no more events come."""
        self._ended = True
        self._change.set()

    def is_urgent(self) -> bool:
        """Return whether a rollout has finished or was dropped, so that the step waits; callable from any thread."""
        return bool(self._outcomes.finished or self._outcomes.dropped)

    async def has_work(self) -> bool:
        """Wait for an event and return true; return false if none is left and none comes."""
        while not (self.is_urgent() or self._outcomes.deferred or self._unread):
            if self._ended:
                return False
            self._change = anyio.Event()
            await self._change.wait()
        return True

    def take_outcomes(self) -> Outcomes:
        """Remove and return the outcomes, with the unread events of the finished rollouts."""
        outcomes, self._outcomes = self._outcomes, Outcomes()
        outcomes.unread = [event for finish in outcomes.finished for event in self.take_unread(finish.rollout)]
        return outcomes

    def take_unread(self, rollout: int) -> list[Growth]:
        """Remove and return the unread events of a rollout."""
        return self._unread.pop(rollout, [])

    def portion(self, tokens: float) -> list[Growth]:
        """Return unread events of at most ``tokens`` tokens together, and one event at least.

        They stay until :meth:`mark_read`. The rollouts that have waited longest come first.
        """
        portion: list[Growth] = []
        for event in chain.from_iterable(self._unread.values()):
            tokens -= len(event.tokens)
            if portion and tokens < 0:
                break
            portion.append(event)
        return portion

    def mark_read(self, portion: Iterable[Growth]) -> None:
        """Remove the events of a portion; later events of their rollouts wait behind all others."""
        for rollout, count in Counter(event.rollout for event in portion).items():
            if left := self._unread.pop(rollout)[count:]:
                self._unread[rollout] = left
