"""Tasks of reasoning-gym: rows, and the verifier as the reward; of the library itself by ``make test-gym``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from oppo import FunctionReward
from oppo.errors import DataError
from oppo.rewards import RewardInputs
from oppo.rewards.tasks import INSTRUCTION, _verifier, task_rows, verify
from tests.kit import gym_stand_in
from tests.kit.responses import ended

EASY = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


@pytest.fixture(params=["stand-in", pytest.param("reasoning-gym", marks=pytest.mark.gym)], autouse=True)
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if request.param == "stand-in":
        gym_stand_in.install(monkeypatch)
    _verifier.cache_clear()
    yield
    _verifier.cache_clear()


def test_the_rows_of_a_task_are_the_same_for_the_same_arguments_and_others_for_another_seed() -> None:
    rows = task_rows("chain_sum", size=60, seed=7)
    assert rows == task_rows("chain_sum", size=60, seed=7)
    assert rows[:20] == task_rows("chain_sum", size=20, seed=7)
    others = task_rows("chain_sum", size=60, seed=8)
    assert not {row["prompt"] for row in rows} & {row["prompt"] for row in others}


def test_a_row_holds_the_question_as_text_and_as_chat_with_what_the_verifier_needs() -> None:
    (row,) = task_rows("chain_sum", size=1, **EASY)
    assert sorted(row) == ["answer", "chat", "metadata", "prompt", "question"]
    assert row["prompt"] == row["question"]
    assert str(row["prompt"]).startswith("State the final answer to the following arithmetic problem: ")
    assert row["chat"] == [{"role": "system", "content": INSTRUCTION}, {"role": "user", "content": row["prompt"]}]


def test_the_verifier_scores_the_answer_in_tags_or_the_whole_completion() -> None:
    rows = task_rows("chain_sum", size=5, **EASY)
    columns = {name: [row[name] for row in rows] for name in ("question", "answer", "metadata")}
    right = [str(answer) for answer in columns["answer"]]
    completions = [
        right[0],
        f" {right[1]}\n",
        f"so <answer>0.5</answer> or rather <answer> {right[2]} </answer>",
        "none",
        f"<answer>none</answer> {right[4]}",
    ]
    scores = verify([], completions, **columns)  # type: ignore[arg-type]  # columns are lists of objects
    assert scores == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert all(isinstance(score, float) for score in scores)


async def test_it_is_a_reward_function() -> None:
    (row,) = task_rows("chain_sum", size=1, **EASY)
    texts = [str(row["answer"]), "banana"]
    reward = FunctionReward(verify, lambda tokens: texts[tokens[0]], inputs=RewardInputs(prompt_column="chat"))
    assert await reward.finish([ended(number, [number], row) for number in range(2)]) == [1.0, 0.0]


@pytest.mark.parametrize(
    ("task", "config", "words"),
    [
        ("chain_sun", {}, "there is no task reasoning-gym:chain_sun; near it are chain_sum"),
        ("xyzzy", {}, "there is no task reasoning-gym:xyzzy; there are .* from "),
        ("chain_sum", {"min_term": 2}, r"reasoning-gym:chain_sum with \{'min_term': 2\}: .*min_term"),
        ("chain_sum", {"min_terms": 3, "max_terms": 2}, "max_terms must be >= min_terms"),
        ("chain_sum", {"size": 0}, "size must be at least 1"),
        ("chain_sum", {"size": 2_000_000}, "at most 1000000 prompts for a seed"),
        ("chain_sum", {"seed": -1}, "seed must be at least 0"),
    ],
)
def test_a_task_that_is_not_there_or_refuses_its_config_is_named(task: str, config: dict[str, int], words: str) -> None:
    with pytest.raises(DataError, match=words):
        task_rows(task, **config)


def test_without_the_library_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.libraries.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"pip install 'oppo\[reasoning-gym\]'"):
        task_rows("chain_sum")


@pytest.mark.gym
@pytest.mark.parametrize("library", ["reasoning-gym"], indirect=True)
@pytest.mark.parametrize("task", ["spell_backward", "letter_counting", "number_sorting", "lcm", "syllogism"])
def test_tasks_of_the_library_score_their_own_answers_with_one(task: str) -> None:
    rows = task_rows(task, size=8, seed=1)
    columns = {name: [row[name] for row in rows] for name in ("question", "answer", "metadata")}
    answers = [f"I think that <answer>{row['answer']}</answer>" for row in rows]
    assert verify([], answers, **columns) == [1.0] * 8  # type: ignore[arg-type]  # columns are lists of objects
