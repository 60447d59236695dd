"""A pipeline of one's own, tested with fake models in virtual time: no torch, no GPU, a second of "training" per step.

Four responses are made for each prompt and compared with one another (leave-one-out baseline, Kool et al. 2019; the
RLOO of Ahmadian et al. 2024), so no critic is needed. What is new is one stage; generation, scoring, deferral of whole
groups and the update are the library's.

    python examples/02_custom_pipeline.py
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oppo import (
    Batch,
    Drop,
    Finish,
    Generate,
    Graph,
    GraphBuilder,
    Overcommit,
    Prompt,
    Receiver,
    Score,
    Scored,
    Sender,
    StepReport,
    Update,
    join,
    merge_chunks,
    rollout_of,
    where,
)
from oppo.events import RolloutEvent
from oppo.stages import GAE
from oppo.stages.advantage import Row
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, noise, prompts, run_virtual

SAMPLES = 4


@dataclass(eq=False)
class LeaveOneOut:
    """The advantage of a response is its score minus the mean score of the others for the same prompt."""

    async def run(
        self, rollout: Receiver[RolloutEvent], score: Receiver[Scored[float] | Drop], /, *, out: Sender[Batch]
    ) -> None:
        """Send one batch as soon as every finished response is scored."""
        rows: list[tuple[Finish, float]] = []
        async for finish, scored in join(where(rollout, Finish), score, key=rollout_of):
            if isinstance(scored, Scored):
                rows.append((finish, scored.value))
        if rows:
            await out.send(batch_of(sorted(rows, key=lambda row: row[0].rollout)))


def batch_of(rows: list[tuple[Finish, float]]) -> Batch:
    """Return the batch of these responses: no reference, no critic, the score as the only reward."""
    groups: dict[int, list[float]] = {}
    for finish, score in rows:
        groups.setdefault(finish.response.prompt.group, []).append(score)
    centred = []
    for finish, score in rows:
        group = groups[finish.response.prompt.group]
        centred.append(score - (sum(group) - score) / max(1, len(group) - 1))
    nothing = [np.zeros(len(finish.response), np.float32) for finish, _ in rows]
    estimator = GAE(gamma=1.0, lam=1.0, kl=0.0, whiten_advantages=False)
    plain = zip(rows, nothing, centred, strict=True)
    return estimator.batch(
        [Row(finish, finish.response.logprobs, advantage, zero) for (finish, _), zero, advantage in plain]
    )


def rloo(policy: FakePolicy, reward: FakeScorer[float], trainer: FakeTrainer) -> Graph[StepReport]:
    """Return the pipeline: three edges, no critic."""
    g: GraphBuilder[Prompt] = GraphBuilder("rloo", merge=merge_chunks, key=rollout_of)
    rollout = g.add("generate", Generate(policy, Overcommit(batch=4, extra=1), samples=SAMPLES), g.prompts)
    score = g.add("reward", Score(reward), rollout)
    batch = g.add("advantage", LeaveOneOut(), rollout, score)
    return g.build(g.add("update", Update(trainer, publish=[policy]), batch))


async def main() -> None:
    """Run three steps; a long group is carried from step to step as a whole."""
    policy = FakePolicy(length=lambda prompt: 10 + int(90 * noise(prompt.rollout) ** 4), seconds=0.01)
    graph = rloo(policy, FakeScorer(fake_scalar, per_token=0.001), trainer := FakeTrainer(seconds=0.5))
    print(graph.mermaid())
    async with graph.open(prompts(100)) as run:
        async for step in run.steps(3):
            groups = sorted({rollout // SAMPLES for rollout in step.trained})
            print(f"step {step.index}: {step.seconds:.2f} virtual seconds, groups {groups}")
    for batch in trainer.batches:
        sums = [
            sum(batch.advantages[row][0] for row in batch.rows()[k : k + SAMPLES])
            for k in range(0, len(batch), SAMPLES)
        ]
        assert np.allclose(sums, 0, atol=1e-5), "the advantages of a group sum to zero"


if __name__ == "__main__":
    run_virtual(main)
