"""Evaluations on vLLM, over a fake of the engine: deferred rollouts go on, held-out ones have the step's weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from oppo.evaluation import Evaluate, Evaluated, Evaluation
from oppo.events import Prompt, StepReport
from oppo.models import Sampling
from oppo.stages import Generate, Update
from oppo.testing import FakeScorer, fake_scalar, run_virtual
from oppo.vllm import VllmPolicy
from tests.pipelines import Pipeline, Setting
from tests.vllm.fake_engine import FakeAsyncLLM, engine_of, running

SAMPLING = Sampling(max_new_tokens=20, stop=(2, 3), seed=5)


def numbered(count: int) -> list[Prompt]:
    return [Prompt(n, n, np.array([10 + n, 4], np.int32), group=n) for n in range(count)]


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_run_on_vllm_is_evaluated_while_rollouts_are_deferred(lookahead: int) -> None:
    llm = FakeAsyncLLM()
    policy = VllmPolicy(engine_of(llm), sampling=SAMPLING)
    pipeline = Pipeline(Setting(batch=3, extra=2, lookahead=lookahead, update=0.3))
    evaluation = Evaluation(
        prompts=numbered(4),
        reward=FakeScorer(fake_scalar),
        greedy=policy.with_sampling(replace(SAMPLING, temperature=0.0)),
        sampled=policy.with_sampling(replace(SAMPLING, seed=9)),
        samples=2,
        batch=4,
    )
    graph = pipeline.graph()
    update = replace(graph.stage("update", Update), synced=[policy, pipeline.critic], held=["evaluate"])
    generate = replace(graph.stage("generate", Generate), policy=policy)
    graph = graph.replace(update=update, generate=generate).then("evaluate", Evaluate(evaluation, lambda step: True))

    async def main() -> list[StepReport]:
        async with (
            running(llm),
            graph.open(numbered(18), observers=[pipeline.tap], lookahead=lookahead) as run,
        ):
            return [report async for report in run.steps(6)]

    reports = run_virtual(main)
    assert sorted(rollout for report in reports for rollout in report.trained) == list(range(18))
    assert any(report.deferred for report in reports)
    found = [item for _, stage, item in pipeline.tap.items if stage == "evaluate" and isinstance(item, Evaluated)]
    assert [each.version for each in found] == [1, 2, 3, 4, 5, 6]
    for each in found:
        assert all((answer.finish.response.versions == each.version).all() for answer in each.answers)
    assert all(report.metrics["eval/sampled_score"] for report in reports)
    assert policy.version == 6
