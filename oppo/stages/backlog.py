"""What a scorer has to do: the events of a step that have come and that it has not dealt with, by their urgency."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
        """Return the next event of each rollout, or of as many as have so many tokens together, and of one at least.

        They are held until they are :meth:`read`. Those come first that have waited longest.
        """
        portion: list[Growth] = []
        for story in self._unread.values():
            story[:] = shortened(story)
            tokens -= len(story[0].tokens)
            if portion and tokens < 0:
                break
            portion.append(story[0])
        return portion

    def read(self, portion: Iterable[Growth]) -> None:
        """Take note that this has been read; what follows it waits behind all others."""
        for event in portion:
            _, *left = self._unread.pop(event.rollout)
            if left:
                self._unread[event.rollout] = left


def waves(events: Sequence[Growth]) -> Iterator[list[Growth]]:
    """Yield the events in order, in lists that hold at most one event of each rollout; contiguous chunks are merged."""
    wave: dict[int, Growth] = {}
    longer: dict[int, list[Growth]] = {}
    for event in events:
        first = wave.setdefault(event.rollout, event)
        if first is not event:
            longer.setdefault(event.rollout, [first]).append(event)
    stories = [shortened(story) for story in longer.values()]
    wave.update((story[0].rollout, story[0]) for story in stories)
    if wave:
        yield list(wave.values())
    place = 1
    while stories := [story for story in stories if len(story) > place]:
        yield [story[place] for story in stories]
        place += 1


def shortened(story: Sequence[Growth]) -> list[Growth]:
    """Return the events of one rollout in order; chunks that follow one another are one."""
    events: list[Growth] = []
    run: list[Chunk] = []
    for event in story:
        if isinstance(event, Chunk):
            run.append(event)
        else:
            events += whole(run)
            events.append(event)
            run.clear()
    return events + whole(run)


def whole(run: Sequence[Chunk]) -> list[Growth]:
    """Return chunks that follow one another as one, if there are any."""
    return [run[0].merge(*run[1:]) if len(run) > 1 else run[0]] if run else []
