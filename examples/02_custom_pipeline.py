"""A pipeline of one's own, tested with fake models in virtual time: no torch, no GPU, a second of "training" per step.

Four responses are made for each prompt and compared with one another (leave-one-out baseline, Kool et al. 2019; the
RLOO of Ahmadian et al. 2024), so no critic is needed. What is new is one stage, written out here to show how one is
(``oppo.GroupRelative`` is the library's own); generation, scoring, deferral of whole groups and the update are not new.

    python examples/02_custom_pipeline.py
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from oppo import (
    Batch,
    Drop,
    Generate,
    Graph,
    GraphBuilder,
    Overcommit,
    Policy,
    Prompt,
    Score,
    Scorer,
    StepReport,
    Trainer,
    Update,
    merge_chunks,
    rollout_of,
    synced_models,
)
from oppo.events import RolloutEvent, Scored
from oppo.graph import Receiver, Sender
from oppo.stages import ScoredRollout, ScoredRollouts
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, noise, prompts, run_virtual

SAMPLES = 4


@dataclass(eq=False)
class LeaveOneOut:
    """The advantage of a response is its score minus the mean score of the others for the same prompt.

    A dropped response leaves its group: the others are compared with one another, and one left alone is dropped too.
    """

    async def run(
        self, rollout: Receiver[RolloutEvent], score: Receiver[Scored[float] | Drop], /, *, out: Sender[Batch]
    ) -> None:
        """Send one batch as soon as every finished response is scored."""
        scored = await ScoredRollouts.of(rollout, score)
        if scored:
            await out.send(batch_of(scored))


def batch_of(scored: ScoredRollouts) -> Batch:
    """Return the batch of these rollouts: their scores as they are, and advantages in which groups are centred."""
    sizes = Counter(each.group for each in scored.rollouts)
    compared = [each for each in scored.rollouts if sizes[each.group] > 1]
    alone = [Drop(each.rollout, "left alone in its group") for each in scored.rollouts if sizes[each.group] == 1]
    dropped = sorted([*scored.dropped, *alone], key=lambda drop: drop.rollout)
    batch = ScoredRollouts(compared, dropped, scored.deferred).batch()
    advantages = np.zeros(len(batch.tokens), np.float32)
    for span, one in zip(batch.rows(), compared, strict=True):
        advantages[span] = np.where(batch.sampled[span], one.score - np.mean(others(one, compared)), 0)
    metrics = {"objective/scores": float(batch.scores.mean())} if compared else {}
    return replace(batch, advantages=advantages, metrics=metrics)


def others(one: ScoredRollout, compared: Sequence[ScoredRollout]) -> list[float]:
    """Return the scores of the other responses to the same prompt."""
    return [other.score for other in compared if other is not one and other.group == one.group]


def rloo(policy: Policy, reward: Scorer[float | Drop], trainer: Trainer) -> Graph[StepReport]:
    """Return the pipeline: three edges, no critic."""
    g: GraphBuilder[Prompt] = GraphBuilder("rloo", merge=merge_chunks, key=rollout_of)
    rollout = g.add("generate", Generate(policy, Overcommit(batch=4, overcommit=1), samples=SAMPLES), g.prompts)
    score = g.add("reward", Score(reward), rollout)
    batch = g.add("advantage", LeaveOneOut(), rollout, score)
    return g.build(g.add("update", Update(trainer, synced=synced_models(policy)), batch))


async def main() -> None:
    """Run three steps; a long group is deferred from step to step as a whole."""
    policy = FakePolicy(length=lambda prompt: 10 + int(90 * noise(prompt.rollout) ** 4), seconds=0.01)
    graph = rloo(policy, FakeScorer(fake_scalar, per_token=0.001), trainer := FakeTrainer(seconds=0.5))
    print(graph.mermaid())
    async with graph.open(prompts(100)) as run:
        async for step in run.steps(3):
            trained = sorted({rollout // SAMPLES for rollout in step.trained})
            late = sorted({event.rollout // SAMPLES for event in step.deferred})
            print(f"step {step.index}: score {step.score:.2f}, groups {trained}, deferred {late}, {step.seconds:.2f} s")
    for batch in trainer.batches:
        assert batch.advantages is not None
        groups = batch.advantages[batch.offsets[:-1]].reshape(-1, SAMPLES)
        assert np.allclose(groups.sum(1), 0, atol=1e-5), "the advantages of a group sum to zero"


if __name__ == "__main__":
    run_virtual(main)
