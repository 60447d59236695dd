"""An examination: prompts answered and scored by a graph of three stages, beside or outside of training."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Final, TypeAlias

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
from oppo.graph import GraphBuilder, Receiver, Sender, Step
from oppo.models import Policy, Scorer
from oppo.numeric import require_whole
from oppo.observe import Observer, Span
from oppo.stages import Generate, Score, ScoredRollout, ScoredRollouts
from oppo.stages.measure import Samples
from oppo.turns import Environment

FIRST: Final = 10**12
"""The number of the first prompt: above those of training, so that scorers and noise tell them apart."""

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


async def examine(
    policy: Policy,
    reward: Scorer[float | Drop],
    prompts: Sequence[Prompt],
    *,
    samples: int = 1,
    batch: int = 64,
    reference: Scorer[FloatArray] | None = None,
    environment: Environment | None = None,
    chunks: ChunkSize | None = None,
    progress: Progress = unseen,
) -> Answers:
    """Return the scored responses of a policy to prompts.

    It decodes while nothing else does, and changes nothing that training depends on. Responses are scored while they
    are written, as in training.

    Args:
        policy: draws as it was told; :class:`oppo.models.VariesSampling` gives the same one with other sampling.
        reward: the score of a finished response, or a ``Drop``.
        prompts: are numbered anew.
        samples: responses to each prompt.
        batch: prompts that are answered at a time.
        reference: log-probs of a reference model, which the answers then have.
        environment: answers the turns of a response.
        chunks: tokens per chunk; 32 by default.
        progress: is told of each response that has ended.

    Raises:
        DataError: there is no prompt.
        ProtocolError: a model broke its protocol.
    """
    require_whole("batch", batch, 1)
    if not prompts:
        raise DataError("an examination needs at least one prompt")
    numbered = [replace(prompt, admission=FIRST + number) for number, prompt in enumerate(prompts)]
    g: GraphBuilder[Prompt] = GraphBuilder(
        "evaluation", capacity=max(16, 4 * batch * samples), merge=merge_chunks, key=rollout_of
    )
    generate = Generate(policy, Synchronous(batch), chunks or Fixed(), samples, environment=environment)
    rollout = g.add("generate", generate, g.prompts)
    score = g.add("reward", Score(reward), rollout)
    ref = None if reference is None else g.add("ref_logp", Score(reference), rollout)
    collect = Collect()
    graph = g.build(g.add("collect", collect, rollout, score, reference=ref))
    counting = _Counting(len(prompts) * samples, progress)
    async with graph.open(numbered, observers=[counting]) as run:
        async for _ in run.steps(math.ceil(len(prompts) / batch)):
            pass
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
        for _, each in step.recorded(Samples):
            for name, values in each.values.items():
                self._measured.setdefault(name, []).extend(values)
        trained = tuple(each.rollout for each in scored.rollouts)
        await out.send(StepReport(step.index, 0, trained, tuple(scored.dropped), (), math.nan, 0.0, {}))

    def answers(self) -> Answers:
        """Return what was kept."""
        return Answers(sorted(self._rollouts, key=lambda each: each.rollout), tuple(self._dropped), self._measured)


class _Counting(Observer):
    """Tells of each rollout that the stage ``generate`` has ended."""

    def __init__(self, total: int, progress: Progress) -> None:
        self._done, self._total, self._progress = 0, total, progress
        progress(0, total)

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        """Count an end."""
        del step, at
        if stage == "generate" and isinstance(item, Finish | Drop):
            self._done += 1
            self._progress(self._done, self._total)

    def on_span(self, span: Span) -> None:
        """Leave spans alone."""

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        """Leave steps alone."""
