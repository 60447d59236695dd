"""Score: rollout events in, one value for each finished rollout out, read while they are still being written."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar

import anyio

from oppo.errors import noted
from oppo.events import Chunk, Defer, Drop, Finish, Given, Prompt, RolloutEvent, Scored
from oppo.graph import Receiver, Sender, Step
from oppo.models import Follower, Scorer
from oppo.observe import Span
from oppo.placement import ahead
from oppo.stages.contract import require_count

T = TypeVar("T")

GROWING = (Chunk, Prompt, Given)
"""What a scorer reads."""


@dataclass(slots=True)
class Session:
    """What a scorer has read of one rollout, and with which weights; valid while both still hold."""

    version: int
    length: int = 0


@dataclass(eq=False)
class Score(Generic[T]):
    """Streams rollouts into a scorer as they grow and sends its value of each when it is complete.

    Everything that has queued up while the scorer was busy is read in one call. Finished rollouts come first, so that
    the step's critical path is short, and go ahead of what other scorers in the same place read of rollouts that go on;
    those fill the time that is left.

    A session made with other weights than the scorer has now is dropped and replayed once, when its rollout finishes;
    of a scorer that follows the trainer, parked rollouts are forgotten at once, since its weights are about to change.

    A scorer that cannot say anything of a rollout answers with a ``Drop`` in the place of its value: the rollout is
    then not trained, and everything else goes on.

    Example:
        >>> from oppo.testing import FakeScorer, fake_scalar
        >>> Score(FakeScorer(fake_scalar)).scorer.version
        0
    """

    scorer: Scorer[T | Drop]
    _sessions: dict[int, Session] = field(default_factory=dict, init=False, repr=False)
    _step: Step = field(default=Step(0, 1, 0.0), init=False, repr=False)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Forget every session."""
        await self._forget(list(self._sessions))

    def begin(self, step: Step) -> None:
        """Learn where to note when the scorer worked."""
        self._step = step

    async def run(self, rollout: Receiver[RolloutEvent], /, *, out: Sender[Scored[T] | Drop]) -> None:
        """Score one step's finished rollouts."""
        while events := await rollout.drain():
            finished = [event for event in events if isinstance(event, Finish)]
            dropped = [event for event in events if isinstance(event, Drop)]
            over = {event.rollout for event in events if self._ends_session(event)}
            await self._forget(sorted(over))
            urgent = {event.rollout for event in finished}
            growing = [event for event in events if isinstance(event, GROWING) and event.rollout not in over]
            with ahead():
                await self._extend([event for event in growing if event.rollout in urgent])
                for result in await self._finish(finished):
                    await out.send(result)
            for drop in dropped:
                await out.send(drop)
            await self._extend([event for event in growing if event.rollout not in urgent])

    async def _finish(self, finished: Sequence[Finish]) -> list[Scored[T] | Drop]:
        """Return what the scorer says of each."""
        if not finished:
            return []
        await self._replay(finished)
        with self._scoring("finish", finished):
            values = await self.scorer.finish(finished)
            require_count(values, len(finished), "finish() of the scorer")
        for event in finished:
            del self._sessions[event.rollout]
        return [
            Drop(event.rollout, value.reason)
            if isinstance(value, Drop)
            else Scored(event.rollout, value, self.scorer.version)
            for event, value in zip(finished, values, strict=True)
        ]

    def _ends_session(self, event: RolloutEvent) -> bool:
        if isinstance(event, Defer):
            return event.restart or isinstance(self.scorer, Follower)
        return isinstance(event, Drop)

    async def _extend(self, events: Sequence[Prompt | Chunk | Given]) -> None:
        for wave in waves(events):
            parts = [event for event in wave if self._accepts(event)]
            if parts:
                with self._scoring("extend", parts):
                    await self.scorer.extend(parts)
                for part in parts:
                    self._sessions[part.rollout].length += len(part.tokens)

    def _accepts(self, event: Prompt | Chunk | Given) -> bool:
        if isinstance(event, Prompt):
            self._sessions[event.rollout] = Session(self.scorer.version)
            return True
        session = self._sessions.get(event.rollout)
        return session is not None and session.version == self.scorer.version

    async def _replay(self, finished: Sequence[Finish]) -> None:
        stale = [event.response for event in finished if not self._valid(event)]
        await self._forget([response.prompt.rollout for response in stale])
        await self._extend([response.prompt for response in stale])
        await self._extend([piece for response in stale for piece in response.pieces()])

    def _valid(self, event: Finish) -> bool:
        session = self._sessions.get(event.rollout)
        whole = len(event.response.prompt.tokens) + len(event.response)
        return session is not None and session.version == self.scorer.version and session.length == whole

    async def _forget(self, rollouts: Sequence[int]) -> None:
        known = [rollout for rollout in rollouts if self._sessions.pop(rollout, None)]
        if known:
            with noted(f"while forgetting rollouts {known}"):
                await self.scorer.forget(known)

    @contextmanager
    def _scoring(self, label: str, events: Sequence[Prompt | Chunk | Given | Finish]) -> Iterator[None]:
        """Note when the scorer worked; name the rollouts in an error."""
        start = anyio.current_time()
        try:
            yield
        except Exception as error:
            error.add_note(f"while scoring rollouts {[event.rollout for event in events]}")
            raise
        self._step.spans.append(Span(self._step.stage, label, start, anyio.current_time()))


def waves(events: Sequence[Prompt | Chunk | Given]) -> Iterator[list[Prompt | Chunk | Given]]:
    """Yield the events in order, in lists that hold at most one event of each rollout; contiguous chunks are merged."""
    wave: dict[int, Prompt | Chunk | Given] = {}
    longer: dict[int, list[Prompt | Chunk | Given]] = {}
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


def shortened(story: Sequence[Prompt | Chunk | Given]) -> list[Prompt | Chunk | Given]:
    """Return the events of one rollout in order; chunks that follow one another are one."""
    events: list[Prompt | Chunk | Given] = []
    run: list[Chunk] = []
    for event in story:
        if isinstance(event, Chunk):
            run.append(event)
        else:
            events += whole(run)
            events.append(event)
            run.clear()
    return events + whole(run)


def whole(run: Sequence[Chunk]) -> list[Prompt | Chunk | Given]:
    """Return chunks that follow one another as one, if there are any."""
    return [run[0].merge(*run[1:]) if len(run) > 1 else run[0]] if run else []
