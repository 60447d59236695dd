"""What may enter a graph, and what is said of the rest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import cast

import numpy as np
import pytest

from oppo import Graph, Overcommit, Prompt, StepReport, ppo
from oppo.data import PromptStream
from oppo.errors import DataError
from oppo.events import IntArray
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


def pipeline() -> Graph[StepReport]:
    return ppo(
        policy=FakePolicy(lambda prompt: 5 + 30 * (prompt.admission % 3 == 0)),
        reference=FakeScorer(fake_per_token),
        reward=FakeScorer(fake_scalar),
        critic=FakeCritic(),
        trainer=FakeTrainer(),
        admission=Overcommit(batch=4, overcommit=2),
    )


def steps_over(source: Iterable[object], count: int = 3) -> list[StepReport]:
    async def make() -> list[StepReport]:
        async with pipeline().open(source) as run:
            return [report async for report in run.steps(count)]

    return run_virtual(make)


def test_a_prompt_number_that_comes_twice_in_a_step_is_refused() -> None:
    with pytest.raises(DataError, match=r"prompt 0 came again while .* oppo\.PromptStream numbers them, anew in each"):
        steps_over(itertools.cycle(prompts(5)))


def test_a_prompt_number_of_a_deferred_rollout_is_refused() -> None:
    carried = prompts(6)
    with pytest.raises(DataError, match="prompt 3 came again"):
        steps_over([*carried, *(prompts(4)[3:] * 4)])


def test_a_few_prompts_are_trained_epoch_after_epoch_when_they_are_numbered_anew() -> None:
    reports = steps_over(PromptStream(prompts(5)))
    trained = [rollout for report in reports for rollout in report.trained]
    assert [len(report.trained) for report in reports] == [4, 4, 4]
    assert len(set(trained)) == 12


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("What is streaming?", "reads prompts as oppo.Prompt, token ids with a number; got 'What is streaming"),
        (np.arange(3, dtype=np.int32), "reads prompts as oppo.Prompt"),
        (Prompt(0, 0, np.zeros(0, np.int32)), r"tokens of prompt 0 must be .* int32 \[1 or more\], not int32 \[0\]"),
        (Prompt(7, 7, cast("IntArray", np.arange(3))), r"tokens of prompt 7 must be .*, not int64 \[3\]"),
        (Prompt(7, 7, cast("IntArray", [1, 2])), r"tokens of prompt 7 must be .*, not \[1, 2\]"),
    ],
)
def test_what_is_no_prompt_is_refused_where_it_is_taken(item: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        steps_over([item])
