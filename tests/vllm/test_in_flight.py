"""A whole pipeline on a fake of vLLM's engine: weights come between two decode steps and wait for no rollout."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from oppo.admission import Admission, Continuous, Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.events import Prompt, StepReport
from oppo.models import Sampling, SyncedModel, Weights
from oppo.stages import GAE, Update
from oppo.testing import FakeCritic, FakeScorer, FakeTrainer, fake_scalar, run_virtual
from oppo.vllm import VllmPolicy
from oppo.weight_sync import sync
from tests.vllm.fake_engine import FakeAsyncLLM, FakeSender, engine_of, running

BATCH, EXTRA, STEPS = 4, 2, 8


class Sending(FakeTrainer):
    """Syncs a tensor."""

    async def sync_weights(self, *synced: SyncedModel) -> None:
        await sync(Weights(self.version, {"weight": torch.zeros(1)}), synced)


def played(
    lookahead: int, *, in_flight: bool, admission: Admission | None = None
) -> tuple[Sending, list[StepReport], FakeAsyncLLM]:
    llm = FakeAsyncLLM(length=lambda prompt: 6 + 9 * (prompt[0] % 4))
    policy = VllmPolicy(engine_of(llm, FakeSender()), sampling=Sampling(max_new_tokens=60, stop=(2, 3)))
    trainer = Sending(0.08)
    graph = ppo(
        policy=policy,
        reward=FakeScorer(fake_scalar),
        critic=FakeCritic(),
        trainer=trainer,
        admission=admission or Overcommit(BATCH, EXTRA),
        advantage=GAE(kl=0.0),
        chunks=Fixed(3),
    )
    if in_flight:
        graph = graph.replace(update=replace(graph.stage("update", Update), after=()))
    asked = [Prompt(n, n, np.array([10 + n, 4], np.int32)) for n in range(100)]

    async def main() -> list[StepReport]:
        reports = []
        async with running(llm), graph.open(asked, lookahead=lookahead) as run:
            reports += [report async for report in run.steps(STEPS)]
        return reports

    return trainer, run_virtual(main), llm


@pytest.mark.parametrize("lookahead", [1, 2])
def test_weights_are_adopted_in_flight_and_staleness_less(lookahead: int) -> None:
    trainer, reports, llm = played(lookahead, in_flight=True)
    at_the_cut, _, _ = played(lookahead, in_flight=False)
    for step, (batch, report) in enumerate(zip(trainer.batches, reports, strict=True)):
        assert len(batch) == BATCH
        staleness = step - batch.versions
        assert staleness.max() <= 2 + lookahead
        assert report.metrics["staleness/max"] == staleness.max()
    fresh = [len(set(response.versions.tolist())) for batch in trainer.batches for response in batch.responses]
    assert max(fresh) > 2, "a response is written by the weights of several updates"
    assert mean_staleness(trainer) < mean_staleness(at_the_cut)
    trained = [rollout for batch in trainer.batches for rollout in batch.rollouts]
    assert len(set(trained)) == len(trained) == BATCH * STEPS
    assert len(llm.updates) == STEPS


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_rollout_that_ends_is_replaced_at_once(lookahead: int) -> None:
    trainer, reports, llm = played(lookahead, in_flight=bool(lookahead), admission=Continuous(BATCH, EXTRA))
    waiting = played(lookahead, in_flight=bool(lookahead), admission=Overcommit(BATCH, 0))[2]
    assert max(llm.rows) == EXTRA
    assert llm.rows.count(EXTRA) > 0.8 * len(llm.rows), "the engine has all its rows but for the end of a step"
    assert waiting.rows.count(BATCH) < 0.5 * len(waiting.rows), "without, the engine is left with the longest"
    trained = [rollout for batch in trainer.batches for rollout in batch.rollouts]
    assert [len(batch) for batch in trainer.batches] == [BATCH] * STEPS
    assert len(set(trained)) == len(trained), "every prompt is trained once"
    assert any(report.deferred for report in reports)


def mean_staleness(trainer: FakeTrainer) -> float:
    return float(np.mean(np.concatenate([step - batch.versions for step, batch in enumerate(trainer.batches)])))
