"""An observer for tests: it keeps all that a run tells, and answers questions about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from oppo.errors import GraphError, ProtocolError
from oppo.events import Batch, Chunk, Defer, Drop, Finish, Given, Prompt, Scored, StepReport, rollout_of
from oppo.observe import Interval, Observer, Span, occupation, seconds, union
from oppo.testing.validation import Sent, faults
from oppo.turns import Answered

NAMES: Final[Mapping[type, str]] = {
    Prompt: "admitted",
    Chunk: "chunk",
    Given: "given",
    Answered: "answered",
    Defer: "deferred",
    Finish: "finished",
    Drop: "dropped",
    Scored: "scored",
    Batch: "batched",
}
"""What has happened to a rollout when a stage sends an item of this type; the names are those of the journal."""

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
        """Keep an item."""
        self.items.append(Sent(step, stage, item, at))

    def on_span(self, span: Span) -> None:
        """Keep a span; safe to call from any thread."""
        self.spans.append(span)

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Keep a report."""
        del step, channels
        if isinstance(result, StepReport):
            self.reports.append(result)

    def story(self, rollout: int) -> list[Happening]:
        """Return all that happened to a rollout, in order; nothing for one that was never admitted."""
        events = ((sent, _event(sent.item, rollout)) for sent in self.items)
        return [Happening(event, sent.step, sent.stage, sent.at, sent.item) for sent, event in events if event]

    def busy(self, track: str) -> float:
        """Return the seconds in which a stage or a model worked: spans that overlap count once.

        A stage that records no work (:meth:`oppo.Step.working`) works as long as it runs.

        Raises:
            GraphError: nothing worked under that name.
        """
        return seconds(self._work(track))

    def overlap(self, one: str, other: str) -> float:
        """Return the seconds in which two stages or models worked at the same time; see :meth:`busy`.

        Raises:
            GraphError: nothing worked under one of the names.
        """
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
    """Return what an item says of a rollout; empty if nothing."""
    if isinstance(item, StepReport):
        dropped = any(drop.rollout == rollout for drop in item.dropped)
        return "trained" if rollout in item.trained else "dropped" * dropped
    if isinstance(item, Batch):
        mine = rollout in item.rollouts
    else:
        mine = (item.rollout if isinstance(item, Answered) else rollout_of(item)) == rollout
    return NAMES.get(type(item), type(item).__name__.lower()) if mine else ""
