"""Score: rollout events in, one value for each finished rollout out, read while they are still being written."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, Self, TypeVar

import anyio

from oppo.errors import as_itself, noted
from oppo.events import Defer, Drop, Finish, Prompt, RolloutEvent, Scored
from oppo.graph import Receiver, Sender, Step
from oppo.models import Follower, PrioritisedScorer, Scorer, TimeSliced
from oppo.scheduling import DEFAULT_TIME_SLICE, IN_ORDER, Preempted, Preemptible, Priority, TimeSlice, Urgent
from oppo.stages.backlog import Backlog, Growth
from oppo.stages.contract import require_count, require_model
from oppo.stages.measure import ScorerCall
from oppo.stages.prioritised import prioritised

T = TypeVar("T")


@dataclass(slots=True)
class SessionState:
    """What a scorer has read of one rollout, and with which weights; valid while both still hold.

    Attributes:
        read: by a scorer that follows the trainer, which will have to read it again if the rollout is carried.
    """

    version: int
    length: int = 0
    read: list[Growth] = field(default_factory=list)


@dataclass(eq=False)
class Score(Generic[T]):
    """Streams rollouts into a scorer as they grow and sends its value of each when it is complete.

    Finished rollouts come first, so that the step's critical path is short; their calls are urgent. Rollouts that go on
    fill the time that is left. Their chunks are read together, in calls no longer than the scorer's time slice
    (:class:`~oppo.models.TimeSliced`); a rollout that has finished preempts such a call while it queues. A scorer is
    given the priority of a call if it is a :class:`~oppo.models.PrioritisedScorer`.

    A session made with other weights than the scorer has now is dropped and replayed once, when its rollout finishes.
    A scorer that follows the trainer forgets parked rollouts at once, since its weights are about to change, and reads
    them again in the next step before they finish.

    A scorer that cannot say anything of a rollout answers with a ``Drop`` in the place of its value: the rollout is
    then not trained, and everything else goes on.

    Example:
        >>> from oppo.testing import FakeScorer, fake_scalar
        >>> Score(FakeScorer(fake_scalar)).scorer.version
        0
    """

    scorer: Scorer[T | Drop]
    _prioritised: PrioritisedScorer[T | Drop] = field(init=False, repr=False)
    _slice: TimeSlice = field(init=False, repr=False)
    _sessions: dict[int, SessionState] = field(default_factory=dict, init=False, repr=False)
    _carried: list[Growth] = field(default_factory=list, init=False, repr=False)
    _pace: float = field(default=0.0, init=False, repr=False)

    def __post_init__(self) -> None:
        require_model(self.scorer, "Scorer", ("version", "extend", "finish", "forget"))
        self._prioritised = prioritised(self.scorer)
        self._slice = self.scorer.time_slice if isinstance(self.scorer, TimeSliced) else DEFAULT_TIME_SLICE
        self._follows = isinstance(self.scorer, Follower)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Forget every session."""
        self._carried.clear()
        await self._forget(list(self._sessions), IN_ORDER)

    async def run(self, rollout: Receiver[RolloutEvent], /, *, out: Sender[Scored[T] | Drop], step: Step) -> None:
        """Score one step's finished rollouts."""
        backlog = Backlog()
        with as_itself():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen, rollout, backlog, name="listen")
                while await backlog.is_left():
                    await self._score_finished(backlog, out, step)
                    await self._go_on(backlog, step)

    async def _listen(self, rollout: Receiver[RolloutEvent], backlog: Backlog) -> None:
        """Take what comes, also while the scorer works; what the last step left to be read again comes before it."""
        again, self._carried = self._carried, []
        while events := await rollout.drain():
            backlog.add((*again, *events))
            again.clear()
        backlog.end()

    async def _score_finished(self, backlog: Backlog, out: Sender[Scored[T] | Drop], step: Step) -> None:
        """Score what has finished, and let go of what will not finish in this step."""
        news = backlog.news()
        with Urgent() as priority:
            await self._read(news.unread, step, priority)
            results = await self._finish(news.finished, step, priority)
        for result in (*results, *news.dropped):
            await out.send(result)
        over: list[Drop | Defer] = [*news.dropped, *(each for each in news.deferred if each.restart or self._follows)]
        for event in over:
            unread, session = backlog.give_up(event.rollout), self._sessions.get(event.rollout)
            if isinstance(event, Defer) and not event.restart:
                self._carried += [*(session.read if session else []), *unread]
        await self._forget(sorted(event.rollout for event in over), IN_ORDER)

    async def _go_on(self, backlog: Backlog, step: Step) -> None:
        """Read some of what nobody waits for, unless something urgent arrives before the call begins."""
        portion = backlog.portion(self._slice.seconds / self._pace if self._pace else math.inf)
        with suppress(Preempted):
            await self._read(portion, step, Preemptible(backlog.is_urgent))
            backlog.read(portion)

    async def _finish(self, finished: Sequence[Finish], step: Step, priority: Priority) -> list[Scored[T] | Drop]:
        """Return what the scorer says of each."""
        if not finished:
            return []
        await self._replay(finished, step, priority)
        with _at_work(finished, step, answered=True):
            values = await self._prioritised.finish(finished, priority=priority)
            require_count(values, len(finished), "finish() of the scorer")
        for event in finished:
            del self._sessions[event.rollout]
        return [
            Drop(event.rollout, value.reason)
            if isinstance(value, Drop)
            else Scored(event.rollout, value, self.scorer.version)
            for event, value in zip(finished, values, strict=True)
        ]

    async def _read(self, events: Sequence[Growth], step: Step, priority: Priority) -> None:
        """Read what the sessions can take."""
        parts = [event for event in events if self._accepts(event)]
        if not parts:
            return
        start = anyio.current_time()
        with _at_work(parts, step, answered=False):
            await self._prioritised.extend(parts, priority=priority)
        pace = (anyio.current_time() - start) / max(1, sum(len(part.tokens) for part in parts))
        self._pace = min(pace, self._slice.rise * self._pace) if self._pace else pace
        for part in parts:
            session = self._sessions[part.rollout]
            session.length += len(part.tokens)
            if self._follows:
                session.read.append(part)

    def _accepts(self, event: Growth) -> bool:
        if isinstance(event, Prompt):
            self._sessions[event.rollout] = SessionState(self.scorer.version)
            return True
        session = self._sessions.get(event.rollout)
        return session is not None and session.version == self.scorer.version

    async def _replay(self, finished: Sequence[Finish], step: Step, priority: Priority) -> None:
        stale = [event.response for event in finished if not self._valid(event)]
        await self._forget([response.prompt.rollout for response in stale], priority)
        parts = [part for response in stale for part in (response.prompt, *response.pieces())]
        await self._read(parts, step, priority)

    def _valid(self, event: Finish) -> bool:
        session = self._sessions.get(event.rollout)
        whole = len(event.response.prompt.tokens) + len(event.response)
        return session is not None and session.version == self.scorer.version and session.length == whole

    async def _forget(self, rollouts: Sequence[int], priority: Priority) -> None:
        known = [rollout for rollout in rollouts if self._sessions.pop(rollout, None)]
        if known:
            with noted(f"while forgetting rollouts {known}"):
                await self._prioritised.forget(known, priority=priority)


@contextmanager
def _at_work(events: Sequence[Growth | Finish], step: Step, *, answered: bool) -> Iterator[None]:
    """Record when the scorer worked; name the rollouts in an error."""
    start = anyio.current_time()
    with noted(f"while scoring rollouts {list(dict.fromkeys(event.rollout for event in events))}"):
        yield
    step.record(ScorerCall(start, anyio.current_time(), answered))
