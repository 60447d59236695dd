"""Invariants of every run, checked on the items of its stages and the reports of its steps."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from oppo.events import (
    Chunk,
    Defer,
    Drop,
    Finish,
    Given,
    Prompt,
    Response,
    Scored,
    StepReport,
    rollout_of,
)


@dataclass(frozen=True, slots=True, eq=False)
class Sent:
    """An item that a stage sent in a step, at a loop time in seconds."""

    step: int
    stage: str
    item: object
    at: float


def faults(items: Sequence[Sent], reports: Sequence[StepReport], source: str) -> Iterator[str]:
    """Yield a sentence for each rule that does not hold; the run may have ended early, or have been resumed.

    Args:
        items: in order.
        reports: of the steps that ended, in order.
        source: the stage whose items are the rollouts' events.
    """
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
    """The events of one rollout so far.

    Attributes:
        known: whether its events begin with its prompt; false in a resumed run, until it begins again.
        state: of its events.
        pieces: of its response so far.
        length: tokens in them.
        newest: version of its last sampled token; -1 without one.
        age: at its last deferral; 0 without one.
        prompt: as it was announced.
        touched: the steps with events of it.
        deferred: those at whose end it was deferred.
        ended: the step in which it finished or was dropped.
        outcomes: by the reports of the steps.
        scorers: that have scored it.
    """

    known: bool
    state: str = "unknown"
    pieces: list[Chunk | Given] = field(default_factory=list)
    length: int = 0
    newest: int = -1
    age: int = 0
    prompt: Prompt | None = None
    touched: set[int] = field(default_factory=set)
    deferred: set[int] = field(default_factory=set)
    ended: int | None = None
    outcomes: list[str] = field(default_factory=list)
    scorers: set[str] = field(default_factory=set)

    def tell(self, event: object, step: int) -> Iterable[str]:
        """Take the next event of the source; return the rules that it breaks."""
        self.touched.add(step)
        if self.ended is not None:
            return [f"{_named(event)} came after its end"]
        match event:
            case Prompt():
                return self._begin(event)
            case Chunk() | Given():
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

    def _grow(self, event: Chunk | Given) -> Iterator[str]:
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
        self.state = "restarts" if event.restart else "parked"

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
    """Yield a sentence for each rollout that a step did not account for, once."""
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
