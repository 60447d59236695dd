"""A teacher behind another prompt in a graph, siblings that passed, and responses of which it says nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st

from oppo.admission import Overcommit
from oppo.algorithms.distill import distill
from oppo.algorithms.group import grpo
from oppo.errors import ConfigError, GraphError
from oppo.events import Batch, Drop, Finish, Prompt, Scored
from oppo.losses.terms import divergences, top_logprobs
from oppo.returns import TopLogprobs
from oppo.scorers import SIBLING, BehindPrompt, Lesson, Untaught
from oppo.stages import Distillation, GroupRelative, Siblings
from oppo.stages.batch import ScoredRollout, scored_rollout
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_per_token, fake_scalar, prompts, run_virtual
from tests.kit.known import known
from tests.kit.responses import ended

THRESHOLD = 0.5


def trained(
    seed: int, *, samples: int, threshold: float = THRESHOLD, lost: int = -1, top_k: int | None = None
) -> list[Batch]:
    """Train for three steps, with a teacher that is shown siblings."""
    dropping = {lost: Drop(lost, "no score")}
    reward: FakeScorer[float | Drop] = FakeScorer(
        lambda end, tokens, version: dropping.get(end.rollout, fake_scalar(end, tokens, version))
    )

    def shown(prompt: Prompt) -> Prompt | None:
        sibling = prompt.columns[SIBLING]
        return None if sibling is None else replace(prompt, tokens=np.append(prompt.tokens, np.asarray(sibling)))

    def said(end: Finish, tokens: tuple[int, ...], version: int) -> Lesson:
        values = fake_per_token(end, tokens, version)
        if top_k is None:
            return values
        ids = np.tile(np.arange(top_k, dtype=np.int32), (len(values), 1))
        return TopLogprobs(values, ids, np.tile(values[:, None], (1, top_k + 1)))

    trainer = FakeTrainer()
    teacher = BehindPrompt[Any](FakeScorer(said), shown, Untaught(top_k))
    policy = FakePolicy(length=lambda prompt: 3 + (prompt.rollout * 7 + seed) % 20)
    given: dict[str, Any] = {
        "policy": policy,
        "reward": reward,
        "teacher": teacher,
        "trainer": trainer,
        "admission": Overcommit(batch=2, overcommit=1),
        "siblings": Siblings(samples, threshold),
        "samples": samples,
    }

    async def main() -> None:
        async with grpo(**given, advantage=GroupRelative(distill=1.0)).open(prompts(30)) as run:
            async for _ in run.steps(3):
                pass

    run_virtual(main)
    return list(trainer.batches)


@given(st.integers(0, 50), st.integers(2, 5), st.sampled_from([0.2, 0.5, 0.9, 2.0]), st.sampled_from([None, 3]))
def test_a_response_is_taught_behind_the_first_other_one_that_passed(
    seed: int, samples: int, threshold: float, top_k: int | None
) -> None:
    batches = trained(seed, samples=samples, threshold=threshold, top_k=top_k)
    assert len(batches) == 3
    for batch in batches:
        teacher = known(batch.teacher)
        groups: dict[int, list[int]] = {}
        for row, response in enumerate(batch.responses):
            groups.setdefault(response.prompt.group, []).append(row)
        for rows in groups.values():
            for row in rows:
                passed = [other for other in rows if other != row and batch.scores[other] >= threshold]
                at, response = batch.rows()[row], batch.responses[row]
                if not passed:
                    assert np.isnan(teacher[at]).all()
                    assert top_k is None or np.isnan(known(batch.teacher_top)[at]).all()
                    assert response.sampled.all()
                    continue
                sibling = batch.responses[passed[0]].tokens
                read = replace(response.prompt, tokens=np.append(response.prompt.tokens, sibling))
                tokens = (*read.tokens.tolist(), *response.tokens.tolist())
                finish = Finish(response.prompt.rollout, replace(response, prompt=read), "eos")
                assert np.array_equal(teacher[at], fake_per_token(finish, tokens, 0))


def test_a_sibling_that_is_dropped_is_shown_to_nobody_and_stops_nothing() -> None:
    batches = trained(1, samples=3, threshold=-1.0, lost=1)
    rollouts = [response.prompt.rollout for batch in batches for response in batch.responses]
    assert 1 not in rollouts
    assert {0, 2} <= {*rollouts}
    assert all(np.isfinite(known(batch.teacher)).all() for batch in batches)


def test_siblings_need_a_group_and_a_teacher_that_reads_them() -> None:
    with pytest.raises(ConfigError, match=r"samples must be 2 or more, not 1: a response alone has no sibling"):
        Siblings(1)
    models: dict[str, Any] = {
        "policy": FakePolicy(),
        "reward": FakeScorer(fake_scalar),
        "trainer": FakeTrainer(),
        "admission": Overcommit(2),
        "teacher": FakeScorer(fake_per_token),
    }
    with pytest.raises(GraphError, match=r"chooses siblings that no teacher reads: give one an oppo\.scorers\.Behind"):
        distill(**models, siblings=Siblings(2), samples=2)


def scored(rollout: int, logprobs: list[float], teacher: Lesson) -> ScoredRollout:
    finish = ended(rollout, range(5, 5 + len(logprobs)))
    finish = replace(finish, response=replace(finish.response, logprobs=np.array(logprobs, np.float32)))
    found = scored_rollout(finish, Scored(rollout, 1.0, 0), teacher=Scored(rollout, teacher, 0))
    assert isinstance(found, ScoredRollout)
    return found


def test_the_advantage_of_a_token_is_the_log_ratio_and_0_where_nothing_is_taught() -> None:
    taught = scored(0, [-1, -2, -0.5], np.array([-0.5, -2.5, -0.5], np.float32))
    batch = Distillation().batch([taught, scored(1, [-1, -2], Untaught())])
    np.testing.assert_allclose(known(batch.advantages), [0.5, -0.5, 0, 0, 0], atol=1e-7)
    assert batch.sampled.all()
    assert batch.metrics["objective/teacher_kl"] == pytest.approx(0.0)


def test_a_teacher_whose_log_probs_are_no_numbers_is_not_taken_for_one_that_says_nothing() -> None:
    finish = ended(0, [5, 6])
    nan: Mapping[str, Lesson] = {"alone": np.full(2, np.nan, np.float32), "with ids": Untaught(2).of(2)}
    for said in nan.values():
        found = scored_rollout(finish, Scored(0, 1.0, 0), teacher=Scored(0, said, 0))
        assert isinstance(found, Drop)
        assert found.reason == "nonfinite teacher log-prob"


def logs(*probabilities: float) -> torch.Tensor:
    return torch.tensor([probabilities], dtype=torch.float64).log()


def test_divergences_of_known_distributions_are_whole_and_never_clipped() -> None:
    forward = divergences(logs(0.5, 0.5), logs(0.9, 0.1), 0.0)
    terms = logs(0.9, 0.1).exp() * (logs(0.9, 0.1) - logs(0.5, 0.5))
    assert terms.flatten().tolist() == pytest.approx([0.52901, -0.16094], abs=1e-5)
    assert terms.clamp(max=0.05).sum().item() == pytest.approx(-0.11094, abs=1e-5)  # what a clip by entry makes of it
    assert forward.item() == pytest.approx(0.36806, abs=1e-5)
    student, teacher = logs(0.6, 0.3, 0.1), logs(0.2, 0.7, 0.1)
    assert divergences(student, teacher, 1.0).item() == pytest.approx(0.40498, abs=1e-5)
    first = torch.tensor([[0]])
    tail = divergences(top_logprobs(student, first), top_logprobs(teacher, first), 1.0)
    assert tail.item() == pytest.approx(0.38191, abs=1e-5)
    one, other = (each[:, :1].log_softmax(-1) for each in (student, teacher))  # renormalised, without the tail
    assert divergences(one, other, 1.0).item() == 0


@given(st.integers(0, 2**16), st.sampled_from([0.0, 0.3, 1.0]), st.integers(1, 6))
def test_a_token_without_a_lesson_counts_in_the_mean_and_has_no_gradient(seed: int, beta: float, count: int) -> None:
    torch.manual_seed(seed)
    logits = torch.randn(count, 7, requires_grad=True)
    teacher = torch.randn(count, 7).log_softmax(-1)
    untaught = torch.rand(count) < 0.5
    teacher[untaught] = torch.nan
    found = divergences(logits.log_softmax(-1), teacher, beta)
    found.mean().backward()
    gradient = known(logits.grad)
    assert not found[untaught].any()
    assert not gradient[untaught].any()
    assert (found.detach() >= -1e-6).all()
    assert untaught.all() or gradient[~untaught].abs().sum() > 0
    other = logits.detach()[~untaught].requires_grad_()
    if len(other):
        (divergences(other.log_softmax(-1), teacher[~untaught], beta).sum() / count).backward()
        torch.testing.assert_close(known(other.grad), gradient[~untaught])
