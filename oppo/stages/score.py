"""Score: rollout events in, read while they are decoded; one value for each finished rollout out."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from types import TracebackType
from typing import Final, Generic, Self, TypeVar

import anyio
from anyio.abc import TaskGroup

from oppo.errors import SessionsLost, as_itself, awaited, enumerated, noted, promised
from oppo.events import Chunk, Defer, Drop, Finish, Prompt, RolloutEvent, Scored, ToolTokens
from oppo.graph import Receiver, Sender, Stateful, Step
from oppo.models import PrioritisedScorer, Scorer, SyncedModel, entered, require_count, require_model
from oppo.scheduling import IN_ORDER, Preempted, Preemptible, Priority, Urgent
from oppo.scorers import CALLED, Extras, Growth, RolloutSession, capabilities_of, prioritised
from oppo.stages.metrics import Averaged, ScorerAnswer, ScorerReading
from oppo.stages.sync import ScorerWeights


@dataclass(eq=False)
class Backlog:
    """Collects the events of a step as they come; returns outcomes at once, and unread events in portions."""

    _finished: list[Finish] = field(default_factory=list)
    _dropped: list[Drop] = field(default_factory=list)
    _deferred: list[Defer] = field(default_factory=list)
    _unread: dict[int, list[Growth]] = field(default_factory=lambda: defaultdict(list))
    _ended: bool = False
    _change: anyio.Event = field(default_factory=anyio.Event)

    def add(self, events: Iterable[RolloutEvent]) -> None:
        unread = self._unread
        for event in events:
            match event:
                case Chunk() | Prompt() | ToolTokens():
                    unread[event.rollout].append(event)
                case Finish():
                    self._finished.append(event)
                case Drop():
                    self._dropped.append(event)
                case Defer():
                    self._deferred.append(event)
        self._change.set()

    def end(self) -> None:
        self._ended = True
        self._change.set()

    def is_urgent(self) -> bool:
        # A rollout has finished or was dropped, so that the step waits; called from any thread.
        return bool(self._finished or self._dropped)

    async def has_work(self) -> bool:
        while not (self.is_urgent() or self._deferred or self._unread):
            if self._ended:
                return False
            self._change = anyio.Event()
            await self._change.wait()
        return True

    def take_outcomes(self) -> tuple[list[Finish], list[Drop], list[Defer]]:
        outcomes = self._finished, self._dropped, self._deferred
        self._finished, self._dropped, self._deferred = [], [], []
        return outcomes

    def take_unread(self, rollout: int) -> list[Growth]:
        return self._unread.pop(rollout, [])

    def portion(self, tokens: float) -> list[Growth]:
        portion: list[Growth] = []
        for event in chain.from_iterable(self._unread.values()):
            tokens -= len(event.tokens)
            if portion and tokens < 0:
                break
            portion.append(event)
        return portion

    def mark_read(self, portion: Iterable[Growth]) -> None:
        for rollout, count in Counter(event.rollout for event in portion).items():
            if left := self._unread.pop(rollout)[count:]:
                self._unread[rollout] = left


T = TypeVar("T")


_LOST: Final = -1  # the version of a session that the scorer has lost


@dataclass(eq=False)
class Score(Generic[T]):
    """Streams rollouts into a scorer as they grow and sends its value of each when it is complete.

    Calls for finished rollouts are urgent and come first, so that the step's critical path is short. Unfinished
    rollouts fill the remaining time: their chunks are read together, in calls no longer than the time slice of the
    scorer's capabilities (:class:`~oppo.scorers.ScorerCapabilities`), which a finished rollout preempts while they
    queue. A :class:`~oppo.models.PrioritisedScorer` receives the priority of each call.

    A session of older weights is dropped and replayed once, when its rollout finishes. So is one that was lost with the
    scorer's process (:class:`~oppo.errors.SessionsLost`). A scorer that follows the trainer forgets deferred rollouts
    at once, since its weights are about to change, and reads them again in the next step before they finish. Its
    weights are synced through :attr:`synced`.

    A scorer of frozen weights whose calls may overlap is called for rollouts that finish while it still scores others.

    A scorer that cannot score a rollout returns a ``Drop`` in place of its value: that rollout is not trained. One with
    state between steps (:class:`~oppo.graph.stage.Stateful`) has it restored when a run is resumed.

    Attributes:
        scorer: the model.
        after: name of a stage; with lookahead the scorer reads nothing before that stage has returned in the step
            before. It then scores with the weights that are about to be updated.
        synced: the synced model of a scorer that follows the trainer; ``None`` for a frozen one.

    Example:
        >>> from oppo.testing import FakeScorer, fake_scalar
        >>> Score(FakeScorer(fake_scalar)).scorer.version
        0
    """

    scorer: Scorer[T | Drop]
    after: str = ""
    synced: ScorerWeights | None = field(init=False, repr=False)
    _prioritised: PrioritisedScorer[T | Drop] = field(init=False, repr=False)
    _sessions: dict[int, RolloutSession] = field(default_factory=dict, init=False, repr=False)
    _kept: dict[int, list[Growth]] = field(default_factory=dict, init=False, repr=False)
    """Tokens that sessions of a synced scorer read or, with older weights, skipped; by rollout."""
    _deferred: list[Growth] = field(default_factory=list, init=False, repr=False)
    _seconds_per_token: float = field(default=0.0, init=False, repr=False)
    """Of the fastest call, inflated by the slice's ``rise`` for each call since; 0 before the first call."""

    def __post_init__(self) -> None:
        require_model(self.scorer, "Scorer", ("version", "extend", "finish", "forget"))
        self._prioritised = prioritised(self.scorer)
        self._opened = AsyncExitStack()
        can = capabilities_of(self.scorer)
        self._slice = can.time_slice
        newest = bool(self.after)
        self.synced = ScorerWeights(self.scorer, newest=newest) if isinstance(self.scorer, SyncedModel) else None
        self._concurrent = can.concurrent and self.synced is None
        if isinstance(self.scorer, Stateful):  # the stage has the state of its scorer
            self.state_dict, self.load_state_dict = self.scorer.state_dict, self.scorer.load_state_dict

    async def __aenter__(self) -> Self:
        self._opened = await entered([self.scorer])
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._deferred.clear()
        async with self._opened:
            try:
                if self.synced is not None:
                    await self.synced.close(failed=error is not None)
            finally:
                await self._forget(list(self._sessions), IN_ORDER)

    async def run(self, rollout: Receiver[RolloutEvent], /, *, out: Sender[Scored[T] | Drop], step: Step) -> None:
        """Score one step's finished rollouts."""
        backlog = Backlog()
        with as_itself():
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._listen, rollout, backlog, name="listen")
                await step.previous(*filter(None, [self.after]))
                if self.synced is not None:
                    await self.synced.begin(step)
                while await backlog.has_work():
                    await self._score_finished(backlog, out, step, tasks)
                    await self._read_ahead(backlog, step)
        if self.synced is not None:
            await self.synced.end(step)

    async def _listen(self, rollout: Receiver[RolloutEvent], backlog: Backlog) -> None:
        deferred, self._deferred = self._deferred, []
        while events := await rollout.drain():
            backlog.add((*deferred, *events))
            deferred.clear()
        backlog.end()

    async def _score_finished(
        self, backlog: Backlog, out: Sender[Scored[T] | Drop], step: Step, tasks: TaskGroup
    ) -> None:
        finished, dropped, deferred = backlog.take_outcomes()
        unread = [event for finish in finished for event in backlog.take_unread(finish.rollout)]
        scores: list[Scored[T] | Drop] = []
        async with self._same_weights():
            with Urgent() as priority:
                await self._read(unread, step, priority)
                await self._replay(finished, step, priority)  # here, since a finish apart should find nothing to read
                if self._concurrent:
                    tasks.start_soon(self._finish_apart, finished, out, step, name="finish")
                else:
                    scores = await self._finish(finished, step, priority)
        for score in (*scores, *dropped):
            await out.send(score)
        closed: list[Drop | Defer] = [*dropped, *(each for each in deferred if each.restart or self.synced)]
        for event in closed:
            unread = backlog.take_unread(event.rollout)
            if isinstance(event, Defer) and not event.restart:
                self._deferred += [*self._kept.get(event.rollout, ()), *unread]
        await self._forget(sorted(event.rollout for event in closed), IN_ORDER)

    async def _read_ahead(self, backlog: Backlog, step: Step) -> None:
        known = self._seconds_per_token
        portion = backlog.portion(self._slice.seconds / known if known else math.inf)
        with suppress(Preempted):
            async with self._same_weights():
                await self._read(portion, step, Preemptible(backlog.is_urgent))
            backlog.mark_read(portion)

    def _same_weights(self) -> AbstractAsyncContextManager[object]:
        return nullcontext() if self.synced is None else self.synced.reading()

    async def _finish_apart(self, finished: Sequence[Finish], out: Sender[Scored[T] | Drop], step: Step) -> None:
        for score in await self._finish(finished, step, IN_ORDER):
            await out.send(score)

    async def _finish(self, finished: Sequence[Finish], step: Step, priority: Priority) -> list[Scored[T] | Drop]:
        if not finished:
            return []
        start = anyio.current_time()
        values = await self._values(finished, step, priority)
        step.record(ScorerAnswer(start, anyio.current_time(), len(finished)))
        can = capabilities_of(self.scorer)
        if samples := can.samples():
            step.record(Averaged(samples))
        if extras := can.extras():
            step.note(Extras(extras))
        for event in finished:
            del self._sessions[event.rollout]
            self._kept.pop(event.rollout, None)
        return [
            replace(value, rollout=event.rollout)
            if isinstance(value, Drop)
            else Scored(event.rollout, value, self.scorer.version)
            for event, value in zip(finished, values, strict=True)
        ]

    async def _values(self, finished: Sequence[Finish], step: Step, priority: Priority) -> Sequence[T | Drop]:
        while True:
            await self._replay(finished, step, priority)
            with _working(finished, step, "finish"), self._sessions_may_be_lost():
                values = await awaited(
                    promised(self._prioritised.finish(finished, priority=priority), CALLED.format("finish"))
                )
                require_count(values, len(finished), CALLED.format("finish"))
                return values

    async def _read(self, events: Sequence[Growth], step: Step, priority: Priority) -> None:
        version = self.scorer.version
        accepted = [event for event in events if self._accepts(event, version)]
        if accepted:
            with self._sessions_may_be_lost():
                await self._extend(accepted, step, priority)
        for event in events if self.synced is not None else ():
            if event.rollout in self._sessions:
                self._kept.setdefault(event.rollout, []).append(event)

    async def _extend(self, accepted: Sequence[Growth], step: Step, priority: Priority) -> None:
        start = anyio.current_time()
        with _working(accepted, step, "extend"):
            await awaited(promised(self._prioritised.extend(accepted, priority=priority), CALLED.format("extend")))
        seconds, tokens, pairs = anyio.current_time() - start, 0, 0.0
        for event in accepted:
            session, n = self._sessions[event.rollout], len(event.tokens)
            tokens += n
            pairs += n * (session.received + n / 2)
            session.received += n
        measured, known = seconds / max(1, tokens), self._seconds_per_token
        self._seconds_per_token = min(measured, self._slice.rise * known) if known else measured
        step.record(ScorerReading(tokens, pairs))

    def _accepts(self, event: Growth, version: int) -> bool:
        if isinstance(event, Prompt):
            self._sessions[event.rollout] = RolloutSession(event.rollout, len(event.tokens), version)
            self._kept.pop(event.rollout, None)
            return True
        session = self._sessions.get(event.rollout)
        return session is not None and session.version == version

    async def _replay(self, finished: Sequence[Finish], step: Step, priority: Priority) -> None:
        lost = True
        while lost:  # once, unless the sessions just read are lost too
            stale = [event.response for event in finished if not self._valid(event)]
            await self._forget([response.prompt.rollout for response in stale], priority)
            events = [event for response in stale for event in (response.prompt, *response.pieces())]
            await self._read(events, step, priority)
            lost = any(self._sessions[event.rollout].version == _LOST for event in finished)

    def _valid(self, event: Finish) -> bool:
        session = self._sessions.get(event.rollout)
        return session is not None and session.version == self.scorer.version and session.holds(event.response)

    async def _forget(self, rollouts: Sequence[int], priority: Priority) -> None:
        known = [rollout for rollout in rollouts if self._sessions.pop(rollout, None)]
        for rollout in known:
            self._kept.pop(rollout, None)
        if known:
            with noted(f"while forgetting rollouts {known}"), self._sessions_may_be_lost():
                await promised(self._prioritised.forget(known, priority=priority), CALLED.format("forget"))

    @contextmanager
    def _sessions_may_be_lost(self) -> Iterator[None]:
        try:
            yield
        except SessionsLost:
            for session in self._sessions.values():
                session.version, session.received = _LOST, 0


class _scoring(noted):  # noqa: N801 - as noted is
    def note(self, error: Exception) -> None:
        if not getattr(error, "names_rollouts", False):
            super().note(error)


@contextmanager
def _working(events: Sequence[Growth | Finish], step: Step, label: str) -> Iterator[None]:
    rollouts = list(dict.fromkeys(event.rollout for event in events))
    with _scoring(f"while scoring rollouts [{enumerated(rollouts)}]"), step.working("score", label):
        yield


def synced_models(*served: object) -> tuple[SyncedModel, ...]:
    """Return the synced models of a trainer: models that follow its weights, or their ``Score`` stages."""
    models = (each.synced if isinstance(each, Score) else each for each in served)
    return tuple(model for model in models if isinstance(model, SyncedModel))
