"""PPO with several responses to each prompt."""

from __future__ import annotations

from collections import Counter

import pytest

import oppo
from oppo.events import StepReport
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    fake_per_token,
    fake_scalar,
    prompts,
    run_virtual,
)


@pytest.mark.parametrize("overcommit", [0, 2])
def test_the_responses_to_a_prompt_are_trained_together_and_once(overcommit: int) -> None:
    trainer = FakeTrainer()
    graph = oppo.ppo(
        policy=FakePolicy(length=lambda prompt: 4 + 40 * (prompt.rollout % 7 == 0)),
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar),
        critic=FakeCritic(),
        trainer=trainer,
        admission=oppo.Overcommit(batch=4, overcommit=overcommit),
        samples=3,
    )

    async def main() -> list[StepReport]:
        async with graph.open(prompts(60)) as run:
            return [report async for report in run.steps(5)]

    reports = run_virtual(main)
    assert any(report.deferred for report in reports) is (overcommit > 0)
    assert [len(report.trained) for report in reports] == [12] * 5
    assert max(Counter(rollout for report in reports for rollout in report.trained).values()) == 1
    for batch in trainer.batches:
        assert set(Counter(response.prompt.group for response in batch.responses).values()) == {3}
        assert batch.returns is not None
