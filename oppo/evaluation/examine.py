"""Prompts answered, and scored, by a graph of a few stages, beside or outside of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TypeAlias

from oppo.admission import Synchronous
from oppo.chunking import ChunkSize, Fixed
from oppo.errors import DataError
from oppo.events import (
    Drop,
    Finish,
    FloatArray,
    Prompt,
    RolloutEvent,
    Scored,
    StepReport,
    merge_chunks,
    rollout_of,
)
from oppo.graph import Graph, GraphBuilder, Receiver, Sender, Step, where
from oppo.models import Policy, Scorer
from oppo.numeric import require_whole
from oppo.observe import Observer, Span
from oppo.stages import Generate, Score, ScoredRollout, ScoredRollouts
from oppo.stages.metrics import Averaged
from oppo.turns import Environment

Progress: TypeAlias = Callable[[int, int], None]
"""``f(done, total)``: how many of the responses have ended."""


def unseen(done: int, total: int) -> None:
    """Show no progress."""
    del done, total


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """The responses to some prompts.

    Attributes:
        rollouts: with their scores, in the order of the prompts, those to one prompt side by side.
        dropped: responses that have no score.
        measured: what the reward said of its parts, by metric, one number for each response.
    """

    rollouts: Sequence[ScoredRollout] = ()
    dropped: Sequence[Drop] = ()
    measured: Mapping[str, Sequence[float]] = field(default_factory=dict)

    def by_prompt(self) -> list[list[float]]:
        """Return the scores of each prompt that has some."""
        groups = groupby(self.rollouts, key=lambda each: each.group)
        return [[each.score for each in group] for _, group in groups]


@dataclass(frozen=True, kw_only=True, eq=False)
class Answering:
    """How prompts are answered.

    Attributes:
        samples: responses to each prompt.
        batch: prompts that are answered at a time.
        environment: answers the turns of a response.
        chunks: tokens per chunk.
        progress: called with the counts whenever a response has ended.
    """

    samples: int = 1
    batch: int = 64
    environment: Environment | None = None
    chunks: ChunkSize = field(default_factory=Fixed)
    progress: Progress = unseen

    def __post_init__(self) -> None:
        require_whole("samples", self.samples, 1)
        require_whole("batch", self.batch, 1)

    def builder(self) -> GraphBuilder[Prompt]:
        """Return the builder of the graph."""
        capacity = max(16, 4 * self.batch * self.samples)
        return GraphBuilder("evaluation", capacity=capacity, merge=merge_chunks, key=rollout_of)

    def generate(self, policy: Policy) -> Generate:
        """Return its first stage."""
        admission = Synchronous(self.batch)
        return Generate(policy, admission, self.chunks, self.samples, environment=self.environment)

    async def run(self, graph: Graph[StepReport], prompts: Sequence[Prompt]) -> None:
        """Answer the prompts.

        Raises:
            DataError: there is none.
        """
        if not prompts:
            raise DataError("expected at least one prompt to answer, got none")
        counting = _Counting(len(prompts) * self.samples, self.progress)
        async with graph.open(prompts, observers=[counting]) as run:
            async for _ in run.steps(math.ceil(len(prompts) / self.batch)):
                pass


async def respond(policy: Policy, prompts: Sequence[Prompt], how: Answering | None = None) -> list[Finish]:
    """Return the responses of a policy to prompts, in their order.

    Raises:
        DataError: there is no prompt.
        ProtocolError: the policy broke its protocol.
    """
    how = how or Answering()
    g, keep = how.builder(), _Keep()
    await how.run(g.build(g.add("collect", keep, g.add("generate", how.generate(policy), g.prompts))), prompts)
    return sorted(keep.finished, key=lambda event: event.rollout)


async def examine(
    policy: Policy,
    reward: Scorer[float | Drop],
    prompts: Sequence[Prompt],
    how: Answering | None = None,
    *,
    reference: Scorer[FloatArray] | None = None,
) -> Answers:
    """Return the scored responses of a policy to prompts, in their order.

    It decodes while nothing else does, and changes nothing that training depends on. Responses are scored while they
    are written, as in training.

    Args:
        policy: draws by its own sampling; :class:`oppo.models.VariesSampling` gives the same one with other sampling.
        reward: the score of a finished response, or a ``Drop``.
        prompts: their numbers are unique, also among the rollouts that a scorer has not finished.
        how: by default one response to each, 64 prompts at a time.
        reference: log-probs of a reference model, which the answers then have.

    Raises:
        DataError: there is no prompt.
        ProtocolError: a model broke its protocol.
    """
    how = how or Answering()
    g, collect = how.builder(), Collect()
    rollout = g.add("generate", how.generate(policy), g.prompts)
    score = g.add("reward", Score(reward), rollout)
    ref = None if reference is None else g.add("ref_logp", Score(reference), rollout)
    await how.run(g.build(g.add("collect", collect, rollout, score, reference=ref)), prompts)
    return collect.answers()


@dataclass(eq=False)
class Collect:
    """The stage at the end: keeps what every step has scored."""

    _rollouts: list[ScoredRollout] = field(default_factory=list, init=False)
    _dropped: list[Drop] = field(default_factory=list, init=False)
    _measured: dict[str, list[float]] = field(default_factory=dict, init=False)

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        score: Receiver[Scored[float] | Drop],
        /,
        *,
        out: Sender[StepReport],
        step: Step,
        reference: Receiver[Scored[FloatArray] | Drop] | None = None,
    ) -> None:
        """Report the step once every finished rollout is scored."""
        scored = await ScoredRollouts.of(rollout, score, reference=reference)
        self._rollouts += scored.rollouts
        self._dropped += scored.dropped
        for _, each in step.recorded(Averaged):
            for name, values in each.values.items():
                self._measured.setdefault(name, []).extend(values)
        await out.send(_report(step, [each.rollout for each in scored.rollouts], scored.dropped))

    def answers(self) -> Answers:
        """Return what was kept."""
        return Answers(sorted(self._rollouts, key=lambda each: each.rollout), tuple(self._dropped), self._measured)


@dataclass(eq=False)
class _Keep:
    """The stage at the end where nothing is scored: keeps the finished rollouts."""

    finished: list[Finish] = field(default_factory=list)

    async def run(self, rollout: Receiver[RolloutEvent], /, *, out: Sender[StepReport], step: Step) -> None:
        own = [event async for event in where(rollout, Finish)]
        self.finished += own
        await out.send(_report(step, [event.rollout for event in own]))


def _report(step: Step, rollouts: Sequence[int], dropped: Sequence[Drop] = ()) -> StepReport:
    return StepReport(step.index, 0, tuple(rollouts), tuple(dropped), (), math.nan, 0.0, {})


class _Counting(Observer):
    """Tells of each rollout that the stage ``generate`` has ended."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress
        progress(0, total)

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        del step, at
        if stage == "generate" and isinstance(item, Finish | Drop):
            self._done += 1
            self._progress(self._done, self._total)

    def on_span(self, span: Span) -> None:
        """Leave spans alone."""

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Leave steps alone."""
