"""An observer for tests: it records all events of a run, answers queries, and checks the run's invariants."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from oppo.errors import GraphError, ProtocolError
from oppo.events import Batch, Chunk, Defer, Drop, Finish, Prompt, Response, Scored, StepReport, ToolTokens, rollout_of
from oppo.observe import Interval, Observer, Span, occupation, seconds, union
from oppo.turns import Answered


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    step: int
    stage: str
    item: object
    at: float


def faults(items: Sequence[Sent], reports: Sequence[StepReport], source: str) -> Iterator[str]:
    # The run may have ended early, or have been resumed.
    if any(later.index <= report.index for report, later in pairwise(reports)):
        yield "step 1 came twice: these are two runs, and each needs a recorder of its own"
        return
    resumed = bool(items) and items[0].step > 0
    lives: dict[int, Life] = {}
    for sent in items:
        rollout = rollout_of(sent.item)
        if sent.stage == source and rollout is not None:
            life = lives.setdefault(rollout, Life(known=not resumed))
            where = f"rollout {rollout}, step {sent.step + 1}"
            yield from (f"{where}: {fault}" for fault in life.tell(sent.item, sent.step))
        elif isinstance(sent.item, Scored) and rollout is not None:
            yield from _scored_once(sent, lives.get(rollout))
    yield from _versions(reports)
    for report in reports:
        yield from (f"step {report.index + 1}: {fault}" for fault in _accounts(report, lives))


@dataclass(slots=True)
class Life:
    known: bool  # whether its events begin with its prompt; false in a resumed run, until it begins again
    state: str = "unknown"
    pieces: list[Chunk | ToolTokens] = field(default_factory=list)
    length: int = 0  # tokens in them
    newest: int = -1  # version of its last sampled token; -1 without one
    age: int = 0  # at its last deferral; 0 without one
    prompt: Prompt | None = None  # as it was announced
    touched: set[int] = field(default_factory=set)  # the steps with events of it
    deferred: set[int] = field(default_factory=set)  # those at whose end it was deferred
    ended: int | None = None  # the step in which it finished or was dropped
    outcomes: list[str] = field(default_factory=list)  # by the reports of the steps
    scorers: set[str] = field(default_factory=set)

    def tell(self, event: object, step: int) -> Iterable[str]:
        self.touched.add(step)
        if self.ended is not None:
            return [f"{_named(event)} came after its end"]
        match event:
            case Prompt():
                return self._begin(event)
            case Chunk() | ToolTokens():
                return self._grow(event)
            case Defer():
                return self._defer(event, step)
            case Finish():
                return self._finish(event, step)
            case Drop():
                self.ended = step
        return []

    def _begin(self, event: Prompt) -> Iterator[str]:
        if self.state not in {"unknown", "restarts"}:
            yield "its Prompt came twice"
        self.state, self.known, self.prompt = "live", True, event
        self.pieces, self.length, self.newest = [], 0, -1

    def _grow(self, event: Chunk | ToolTokens) -> Iterator[str]:
        if self.known and self.state == "unknown":
            yield f"{_named(event)} came before its Prompt"
        if self.known and event.start != self.length:
            yield f"{_named(event)} begins at {event.start}, and {self.length} tokens have come"
        self.state, self.length = "live", event.start + len(event.tokens)
        self.pieces.append(event)
        if isinstance(event, Chunk) and len(event.versions):
            if (np.diff(event.versions, prepend=self.newest) < 0).any():
                yield f"versions decrease: {event.versions.tolist()} after {self.newest}"
            self.newest = int(event.versions[-1])

    def _defer(self, event: Defer, step: int) -> Iterator[str]:
        self.deferred.add(step)
        if self.age and event.age != self.age + 1:
            yield f"it was deferred at age {event.age} after age {self.age}"
        self.age = event.age
        self.state = "restarts" if event.restart else "deferred"

    def _finish(self, event: Finish, step: int) -> Iterator[str]:
        self.ended = step
        if self.prompt is None or not self.known:
            return
        streamed = Response.of(self.prompt, self.pieces) if self.pieces else Response.empty(self.prompt)
        if not np.array_equal(streamed.tokens, event.response.tokens):
            yield f"its response has {len(event.response)} tokens, which are not the {len(streamed)} of its chunks"
        elif not np.array_equal(streamed.sampled, event.response.sampled):
            yield "its response and its chunks differ in which tokens were sampled"


def _scored_once(sent: Sent, life: Life | None) -> Iterator[str]:
    if life is None:
        yield f"rollout {rollout_of(sent.item)}: {sent.stage!r} scored it before it was admitted"
    elif sent.stage in life.scorers:
        yield f"rollout {rollout_of(sent.item)}, step {sent.step + 1}: {sent.stage!r} scored it twice"
    else:
        life.scorers.add(sent.stage)


def _versions(reports: Sequence[StepReport]) -> Iterator[str]:
    for report, later in pairwise(reports):
        if later.index != report.index + 1:
            yield f"step {later.index + 1} was reported after step {report.index + 1}"
        if later.version <= report.version:
            yield f"step {later.index + 1}: the version is {later.version} after {report.version}"


def _accounts(report: StepReport, lives: dict[int, Life]) -> Iterator[str]:
    outcomes = [
        *((rollout, "trained") for rollout in report.trained),
        *((e.rollout, "dropped") for e in report.dropped),
    ]
    for rollout, outcome in outcomes:
        life = lives.get(rollout)
        if life is None:
            yield f"rollout {rollout} was {outcome}, and was never admitted"
            continue
        if life.ended != report.index:
            when = "has not ended" if life.ended is None else f"ended in step {life.ended + 1}"
            yield f"rollout {rollout} was {outcome}, and {when}"
        if life.outcomes:
            yield f"rollout {rollout} was {outcome}, after it was {life.outcomes[-1]}"
        life.outcomes.append(outcome)
    reported = {event.rollout for event in report.deferred}
    deferred = {rollout for rollout, life in lives.items() if report.index in life.deferred}
    if reported != deferred:
        yield f"the report defers {sorted(reported)}, and {sorted(deferred)} were deferred"
    for rollout, life in lives.items():
        if life.ended == report.index and not life.outcomes:
            yield f"rollout {rollout} ended, and was neither trained nor dropped"
        elif report.index in life.touched - life.deferred and life.ended != report.index:
            yield f"rollout {rollout} neither ended nor was deferred"


def _named(event: object) -> str:
    return f"a {type(event).__name__}"


# Events of a rollout, as the journal names them, by the type of the item that a stage sends
NAMES: Final[Mapping[type, str]] = {
    Prompt: "admitted",
    Chunk: "chunk",
    ToolTokens: "tool tokens",
    Answered: "answered",
    Defer: "deferred",
    Finish: "finished",
    Drop: "dropped",
    Scored: "scored",
    Batch: "batched",
}

_SHOWN = 5  # faults in an error


@dataclass(frozen=True, slots=True, eq=False)
class Happening:
    """Something that happened to a rollout.

    Attributes:
        event: ``admitted``, ``chunk``, ``given``, ``answered``, ``deferred``, ``finished``, ``scored``, ``batched``,
            ``trained`` or ``dropped``.
        step, stage: where.
        at: loop time, in seconds.
        item: that the stage sent.
    """

    event: str
    step: int
    stage: str
    at: float
    item: object


class Recorder(Observer):
    """An observer that keeps the items, the spans and the reports of one run, in memory.

    The fixture ``recorder`` of the pytest plugin is one, which is validated when the test is over.

    Args:
        source: the stage whose items are the rollouts' events.

    Attributes:
        items: that stages sent, in order.
        spans: of executions, of work, of whole steps; :meth:`on_span` may also be the listener of models in threads.
        reports: of the steps.

    Example:
        >>> import oppo
        >>> from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, prompts, run_virtual
        >>> async def steps(recorder: Recorder) -> None:
        ...     reward, batch = FakeScorer(fake_scalar, per_token=0.005), oppo.Overcommit(1)
        ...     graph = oppo.grpo(policy=FakePolicy(), reward=reward, trainer=FakeTrainer(), admission=batch)
        ...     async with graph.open(prompts(2), observers=[recorder]) as run:
        ...         await run.step()
        >>> recorder = Recorder()
        >>> run_virtual(steps, recorder)
        >>> [each.event for each in recorder.story(0)]
        ['admitted', 'chunk', 'finished', 'scored', 'batched', 'trained']
    """

    def __init__(self, *, source: str = "generate") -> None:
        self.items: list[Sent] = []
        self.spans: list[Span] = []
        self.reports: list[StepReport] = []
        self._source = source

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        self.items.append(Sent(step, stage, item, at))

    def on_span(self, span: Span) -> None:
        """Keep a span; safe to call from any thread."""
        self.spans.append(span)

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        del step, channels
        if isinstance(result, StepReport):
            self.reports.append(result)

    def story(self, rollout: int) -> list[Happening]:
        """Return all that happened to a rollout, in order; nothing for one that was never admitted."""
        events = ((sent, _event(sent.item, rollout)) for sent in self.items)
        return [Happening(event, sent.step, sent.stage, sent.at, sent.item) for sent, event in events if event]

    def busy(self, track: str) -> float:
        """Return the seconds in which a stage or a model worked: spans that overlap count once.

        A stage that records no work (:meth:`oppo.graph.Step.working`) works as long as it runs.
        """
        return seconds(self._work(track))

    def overlap(self, one: str, other: str) -> float:
        """Return the seconds in which two stages or models worked at the same time; see :meth:`busy`."""
        a, b = self._work(one), self._work(other)
        return seconds(a) + seconds(b) - seconds(union([*a, *b]))

    def hidden_fraction(self) -> float:
        """Return the fraction of the scoring time that decoding or training hid, 0 to 1; NaN without scoring."""
        return occupation(self.spans).hidden

    def validate(self) -> None:
        """Check what must hold of every run, also of one that was ended early.

        A rollout's events follow their grammar (:mod:`oppo.events`); its response is what its chunks say; each step
        trains, drops or defers every rollout that it decoded; a rollout is trained or dropped once, when it has
        finished; versions only grow.

        Raises:
            ProtocolError: it does not hold; names rollouts and steps.
        """
        found = list(faults(self.items, self.reports, self._source))
        if found:
            rest = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
            raise ProtocolError("\n".join(["the run is not valid:", *found[:_SHOWN], *rest]))

    def _work(self, track: str) -> Sequence[Interval]:
        mine = [span for span in self.spans if span.track == track]
        if not mine:
            known = ", ".join(repr(name) for name in dict.fromkeys(span.track for span in self.spans))
            raise GraphError(f"nothing worked as {track!r} in this run; the stages and models are {known or 'none'}")
        work = [span for span in mine if span.kind == "work"]
        return union((span.start, span.end) for span in work or mine)


def _event(item: object, rollout: int) -> str:
    if isinstance(item, StepReport):
        dropped = any(drop.rollout == rollout for drop in item.dropped)
        return "trained" if rollout in item.trained else "dropped" * dropped
    if isinstance(item, Batch):
        mine = rollout in item.rollouts
    else:
        mine = (item.rollout if isinstance(item, Answered) else rollout_of(item)) == rollout
    return NAMES.get(type(item), type(item).__name__.lower()) if mine else ""
