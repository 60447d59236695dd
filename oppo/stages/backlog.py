"""What a scorer has to do: the events of a step that have come and that it has not dealt with, by their urgency."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TypeAlias

import anyio

from oppo.events import Chunk, Defer, Drop, Finish, Given, Prompt, RolloutEvent

Growth: TypeAlias = Prompt | Chunk | Given
"""What a scorer reads."""


@dataclass(frozen=True, slots=True)
class News:
    """What has come that changes what is to be done.

    Attributes:
        unread: what has not been read yet of the finished rollouts.
    """

    finished: Sequence[Finish]
    dropped: Sequence[Drop]
    deferred: Sequence[Defer]
    unread: Sequence[Growth]


@dataclass(eq=False)
class Backlog:
    """Takes the events of a step as they come; says what is urgent, and gives the rest in portions."""

    _finished: list[Finish] = field(default_factory=list)
    _dropped: list[Drop] = field(default_factory=list)
    _deferred: list[Defer] = field(default_factory=list)
    _unread: dict[int, list[Growth]] = field(default_factory=dict)
    _ended: bool = False
    _change: anyio.Event = field(default_factory=anyio.Event)

    def add(self, events: Iterable[RolloutEvent]) -> None:
        """Take more events."""
        for event in events:
            match event:
                case Finish():
                    self._finished.append(event)
                case Drop():
                    self._dropped.append(event)
                case Defer():
                    self._deferred.append(event)
                case _:
                    self._unread.setdefault(event.rollout, []).append(event)
        self._change.set()

    def end(self) -> None:
        """Take note that there will be no more."""
        self._ended = True
        self._change.set()

    def is_urgent(self) -> bool:
        """Return whether a step waits for something that is here; may be asked from another thread."""
        return bool(self._finished or self._dropped)

    async def is_left(self) -> bool:
        """Return whether anything is left to do, once that is known."""
        while not (self._is_anything() or self._ended):
            self._change = anyio.Event()
            await self._change.wait()
        return self._is_anything()

    def _is_anything(self) -> bool:
        return bool(self._finished or self._dropped or self._deferred or self._unread)

    def news(self) -> News:
        """Return, and no longer hold, all but what is to be read of rollouts that go on."""
        unread = [part for event in self._finished for part in self.give_up(event.rollout)]
        news = News(self._finished, self._dropped, self._deferred, unread)
        self._finished, self._dropped, self._deferred = [], [], []
        return news

    def give_up(self, rollout: int) -> list[Growth]:
        """Return, and no longer hold, what is unread of a rollout."""
        return self._unread.pop(rollout, [])

    def portion(self, tokens: float) -> list[Growth]:
        """Return what is to be read, or as much of it as has so many tokens together, and one event at least.

        It is held until it is :meth:`read`. Those rollouts come first that have waited longest.
        """
        portion: list[Growth] = []
        for event in chain.from_iterable(self._unread.values()):
            tokens -= len(event.tokens)
            if portion and tokens < 0:
                break
            portion.append(event)
        return portion

    def read(self, portion: Iterable[Growth]) -> None:
        """Take note that this has been read; what follows it waits behind all others."""
        for rollout, count in Counter(event.rollout for event in portion).items():
            if left := self._unread.pop(rollout)[count:]:
                self._unread[rollout] = left
