"""The critic-free pipeline that people copy: true scores, groups that are deferred, groups that lost a member."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module

import numpy as np
import pytest

from oppo import Drop, Graph, Policy, Scorer, StepReport, Trainer
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, noise, prompts, run_virtual
from tests.kit.known import known

rloo: Callable[[Policy, Scorer[float | Drop], Trainer], Graph[StepReport]] = import_module(
    "examples.02_custom_pipeline"
).rloo


def trained(lost: frozenset[int] = frozenset()) -> tuple[list[StepReport], FakeTrainer]:
    policy, trainer = FakePolicy(length=lambda prompt: 10 + int(90 * noise(prompt.rollout) ** 4)), FakeTrainer()
    reward: FakeScorer[float | Drop] = FakeScorer(
        lambda end, tokens, version: (
            Drop(end.rollout, "no score") if end.rollout in lost else fake_scalar(end, tokens, version)
        )
    )

    async def main() -> list[StepReport]:
        async with rloo(policy, reward, trainer).open(prompts(100)) as run:
            return [report async for report in run.steps(3)]

    return run_virtual(main), trainer


def test_scores_are_the_rewards_own_and_deferred_groups_are_recorded() -> None:
    reports, trainer = trained()
    assert reports[0].deferred
    assert len(reports[0].deferred) % 4 == 0
    for report, batch in zip(reports, trainer.batches, strict=True):
        assert report.score == pytest.approx(float(batch.scores.mean()))
        assert report.score > 0.2
        assert report.metrics["objective/scores"] == pytest.approx(report.score)


def test_the_advantages_of_a_group_sum_to_zero_over_those_that_are_left_of_it() -> None:
    reports, trainer = trained(lost=frozenset({1}))
    assert reports[0].dropped == (Drop(1, "no score"),)
    batch = trainer.batches[0]
    rows = [row for row, rollout in enumerate(batch.rollouts) if rollout // 4 == 0]
    assert [batch.rollouts[row] for row in rows] == [0, 2, 3]
    first = [float(known(batch.advantages)[batch.offsets[row]]) for row in rows]
    assert sum(first) == pytest.approx(0, abs=1e-5)
    assert first[0] == pytest.approx(batch.scores[rows[0]] - np.mean(batch.scores[rows[1:]]), abs=1e-5)


def test_a_response_that_is_left_alone_is_dropped_too() -> None:
    reports, trainer = trained(lost=frozenset({0, 1, 3}))
    assert reports[0].dropped == (
        Drop(0, "no score"),
        Drop(1, "no score"),
        Drop(2, "left alone in its group"),
        Drop(3, "no score"),
    )
    assert not {0, 1, 2, 3} & set(trainer.batches[0].rollouts)
