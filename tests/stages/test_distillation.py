"""A teacher's part in the advantages: as plain float64 code computes it, alone and after a task's own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo.admission import Overcommit
from oppo.algorithms.group import grpo
from oppo.algorithms.ppo import ppo
from oppo.errors import GraphError, ModelError
from oppo.events import Finish, FloatArray, Prompt, Response
from oppo.scorers import ByColumn
from oppo.stages import GAE, Distillation, GroupRelative, InParts, Score
from oppo.stages.advantage import AdaptiveObjective
from oppo.stages.batch import ScoredRollout
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_per_token, fake_scalar, run_virtual
from tests.kit.known import known

SCORED = (FakeScorer(fake_scalar), FakeTrainer())


def rows(seed: int, *, proximal: bool = False, groups: int = 2) -> list[ScoredRollout]:
    """Return pairs of responses of several lengths, with tool tokens, scores, values and a teacher's log-probs."""
    dice, found = np.random.default_rng(seed), []
    for rollout in range(2 * groups):
        length = int(dice.integers(1, 9))
        sampled = dice.random(length) < 0.7
        sampled[dice.integers(length)] = True
        log, teacher, values, again = (-dice.random((4, length)) * 5).astype(np.float32)
        tokens, versions = np.arange(length, dtype=np.int32), np.zeros(length, np.int32)
        prompt = Prompt(rollout, rollout // 2, tokens[:1], group=rollout // 2)
        response = Response(prompt, tokens, log * sampled, versions, sampled)
        score, newest = float(dice.normal()), again if proximal else None
        scored = ScoredRollout(Finish(rollout, response, "eos"), None, score, values, newest, teacher)
        found.append(scored)
    return found


def by_hand(each: ScoredRollout, task: FloatArray, coefficient: float) -> Sequence[float]:
    response, teacher = each.finish.response, known(each.teacher).tolist()
    policy = (response.logprobs if each.proximal is None else each.proximal).tolist()
    return [
        float(task[t]) - coefficient * (policy[t] - teacher[t]) if response.sampled[t] else 0.0
        for t in range(len(response))
    ]


@given(st.integers(0, 2**32 - 1), st.floats(1e-3, 10), st.booleans())
def test_the_teacher_adds_its_log_ratio_to_each_sampled_token_after_all_else(
    seed: int, coefficient: float, proximal: bool
) -> None:
    scored = rows(seed, proximal=proximal)
    for stage in (GAE(kl=0), GroupRelative("leave_one_out"), GroupRelative()):
        task, both = stage.batch(scored), replace(stage, distill=coefficient).batch(scored)
        expected = [
            by_hand(each, known(task.advantages)[at], coefficient) for each, at in zip(scored, task.rows(), strict=True)
        ]
        np.testing.assert_allclose(known(both.advantages), np.concatenate(expected), rtol=1e-6, atol=1e-6)
        assert task.returns is both.returns is None or np.array_equal(known(task.returns), known(both.returns))
    alone = Distillation(coefficient).batch(scored)
    expected = [by_hand(each, np.zeros(9, np.float32), coefficient) for each in scored]
    np.testing.assert_allclose(known(alone.advantages), np.concatenate(expected), rtol=1e-6, atol=1e-6)
    kl = [-sum(by_hand(each, np.zeros(9, np.float32), 1.0)) for each in scored]
    assert alone.metrics["objective/teacher_kl"] == pytest.approx(sum(kl) / len(kl), rel=1e-5, abs=1e-5)


def test_a_group_that_goes_early_has_the_teacher_s_part_too() -> None:
    scored = rows(3)
    stage = GroupRelative("centred", distill=0.5)
    whole, part = stage.batch(scored), InParts(stage, 2)._early(scored[:2])
    assert np.array_equal(known(part.advantages), known(whole.advantages)[: len(part.tokens)])


def test_a_masked_response_teaches_nothing() -> None:
    scored = rows(5)
    cut = replace(scored[0], finish=replace(scored[0].finish, reason="length"))
    batch = Distillation(mask_truncated=True).batch([cut, *scored[1:]])
    assert not batch.sampled[batch.rows()[0]].any()
    assert batch.sampled[batch.rows()[1]].any()


@pytest.mark.parametrize(
    ("teacher", "coefficient", "reason"),
    [(-np.inf, 1.0, "nonfinite teacher log-prob"), (-3e38, 10.0, "nonfinite reward"), (-1.0, 1.0, "")],
)
def test_a_rollout_that_float32_does_not_hold_is_dropped_by_name(
    teacher: float, coefficient: float, reason: str
) -> None:
    first, *others = rows(7)
    bad = np.full(len(first.finish.response), teacher, np.float32)
    fault = replace(first, teacher=bad).fault()
    said = "" if fault is None else fault.reason
    if fault is None:
        with np.errstate(over="ignore"):
            batch = Distillation(coefficient).batch([replace(first, teacher=bad), *others])
        said = batch.dropped[0].reason if batch.dropped else ""
        assert np.isfinite(known(batch.advantages)).all()
    assert said == reason


def test_an_empty_batch_stays_empty() -> None:
    batch = Distillation().batch([])
    assert (len(batch), len(known(batch.advantages)), dict(batch.metrics)) == (0, 0, {})


@pytest.mark.parametrize("stage", [GAE(kl=0, distill=0.5), Distillation()], ids=["GAE", "Distillation"])
def test_a_weight_without_a_teacher_is_a_fault_of_the_graph(stage: AdaptiveObjective) -> None:
    reward, trainer = SCORED
    models = {"policy": FakePolicy(), "reward": reward, "trainer": trainer, "admission": Overcommit(2)}
    with pytest.raises(GraphError, match=r"needs a teacher: connect teacher=stream, or leave distill out"):
        ppo(**models, advantage=stage)  # type: ignore[arg-type]  # all are fakes
    assert ppo(**models, advantage=stage, teacher=FakeScorer(fake_per_token))  # type: ignore[arg-type]
    with pytest.raises(GraphError, match=r"distill = 0\.5, which needs a teacher"):
        grpo(**models, advantage=GroupRelative(distill=0.5))  # type: ignore[arg-type]


def test_scorers_by_a_column_are_open_as_long_as_the_run() -> None:
    class Service(FakeScorer[float]):
        open = 0

        async def __aenter__(self) -> Self:
            self.open += 1
            return self

        async def __aexit__(self, *error: object) -> None:
            self.open -= 1

    async def main() -> None:
        service = Service(lambda *_: 1.0)
        async with Score(ByColumn("domain", {"math": service, "code": FakeScorer(lambda *_: 2.0)})):
            assert service.open == 1
        assert service.open == 0

    run_virtual(main)


def test_scorers_by_a_column_read_their_own_rollouts_and_answer_in_order() -> None:
    async def main() -> None:
        parts = {"math": FakeScorer(lambda *_: 1.0), "code": FakeScorer(lambda *_: 2.0)}
        scorer = ByColumn("domain", parts)
        tokens = np.arange(2, dtype=np.int32)
        prompts = [
            Prompt(rollout, rollout, tokens, columns={"domain": name})
            for rollout, name in enumerate(("math", "code", "math", "code"))
        ]
        await scorer.extend(prompts)
        finished = [Finish(prompt.rollout, Response.empty(prompt), "eos") for prompt in prompts]
        await scorer.forget([3, 9])
        assert await scorer.finish(finished[2::-1]) == [1.0, 2.0, 1.0]
        await scorer.extend(prompts[:1])
        with pytest.raises(ModelError, match=r"expected one of math, code in the column 'domain' .* got None"):
            await scorer.extend([replace(prompts[0], columns={})])

    run_virtual(main)
