from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from oppo.errors import RewardError
from oppo.events import Chunk, Finish, Prompt, Response
from oppo.rewards import FunctionReward, load_function
from oppo.testing.loop import run_virtual


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


def finish(rollout: int, tokens: list[int], columns: Mapping[str, object] | None = None) -> Finish:
    prompt = Prompt(rollout, rollout, np.array([1, 2], np.int32), columns=columns or {})
    n = len(tokens)
    chunk = Chunk(rollout, 0, np.array(tokens, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32))
    return Finish(rollout, Response.empty(prompt).then(chunk), "eos")


TWO = [finish(3, [5, 6], {"answer": "x", "level": 1}), finish(8, [7], {"answer": "y"})]


async def test_a_function_gets_aligned_lists_and_the_columns_it_names() -> None:
    seen: dict[str, object] = {}

    def reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        seen.update(prompts=prompts, completions=completions, answer=answer, thread=threading.current_thread().name)
        return [1.0, 2.0]

    assert await FunctionReward(reward, decode).finish(TWO) == [1.0, 2.0]
    assert seen.pop("thread") != threading.current_thread().name
    assert seen == {"prompts": ["1 2", "1 2"], "completions": ["5 6", "7"], "answer": ["x", "y"]}


async def test_a_function_with_keywords_gets_every_column_with_none_where_a_row_has_none() -> None:
    def reward(prompts: list[str], completions: list[str], **columns: list[object]) -> list[float]:
        assert columns == {"answer": ["x", "y"], "level": [1, None]}
        return [0.0 for _ in zip(prompts, completions, strict=True)]

    assert await FunctionReward(reward, decode).finish(TWO) == [0.0, 0.0]


async def test_the_datas_own_prompt_is_handed_over_as_it_stands() -> None:
    chat = [{"role": "user", "content": "hello"}]

    def reward(prompts: list[object], completions: list[str]) -> list[float]:
        assert prompts == [chat]
        return [float(len(completions))]

    assert await FunctionReward(reward, decode).finish([finish(0, [5], {"prompt": chat})]) == [1.0]


async def test_an_async_function_is_awaited_on_the_loop() -> None:
    async def reward(prompts: list[str], completions: list[str]) -> list[float]:
        assert threading.current_thread() is threading.main_thread()
        return [float(len(each)) for each in completions]

    assert await FunctionReward(reward, decode).finish(TWO) == [3.0, 1.0]


async def test_arrays_of_numbers_are_scores() -> None:
    def reward(prompts: list[str], completions: list[str]) -> object:
        return np.array([0.5, 1.5], np.float32)

    scores = await FunctionReward(reward, decode).finish(TWO)
    assert scores == [0.5, 1.5]
    assert all(type(score) is float for score in scores)


async def test_nothing_finished_calls_nothing() -> None:
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        raise AssertionError

    scorer = FunctionReward(reward, decode)
    await scorer.extend([])
    await scorer.forget([1])
    assert await scorer.finish([]) == []
    assert scorer.version == 0


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        ([1.0, None], "for rollout 8 it returned None (NoneType)"),
        ([float("nan"), 1.0], "for rollout 3 it returned nan (float)"),
        ([1.0, float("inf")], "for rollout 8 it returned inf (float)"),
        ([1.0, "2"], "for rollout 8 it returned '2' (str)"),
        ([1.0, [2.0, 3.0]], "for rollout 8 it returned [2.0, 3.0] (list)"),
        ([1.0, np.array([2.0, 3.0])], "for rollout 8 it returned array([2., 3.]) (ndarray)"),
        ([1.0], "must return 2 numbers, one for each completion; got 1"),
        (1.0, "must return 2 numbers, one for each completion; got float 1.0"),
        (None, "got NoneType None"),
        ("ab", "got str 'ab'"),
        ({1: 1, 2: 2}, "got dict {1: 1, 2: 2}"),
    ],
)
async def test_what_is_no_score_stops_the_run(returned: object, sentence: str) -> None:
    def reward(prompts: list[str], completions: list[str]) -> object:
        return returned

    with pytest.raises(RewardError) as caught:
        await FunctionReward(reward, decode).finish(TWO)
    assert "'reward'" in str(caught.value)
    assert sentence in str(caught.value)


async def test_a_function_that_raises_is_named_with_its_rollouts() -> None:
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(RewardError, match=r"'reward' raised KeyError: 'gold' \(rollouts 3, 8\)") as caught:
        await FunctionReward(reward, decode).finish(TWO)
    assert isinstance(caught.value.__cause__, KeyError)


async def test_a_column_that_is_asked_for_but_not_there_is_named() -> None:
    def reward(prompts: list[str], completions: list[str], gold: list[str]) -> list[float]:
        raise AssertionError

    with pytest.raises(RewardError, match=r"asks for 'gold', which is no column of the data; .* answer, level"):
        await FunctionReward(reward, decode).finish(TWO)


async def test_a_column_may_not_bear_the_name_of_an_argument() -> None:
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        raise AssertionError

    with pytest.raises(RewardError, match="column 'completions' bears the name"):
        await FunctionReward(reward, decode).finish([finish(0, [5], {"completions": 1})])


def module(folder: Path, source: str) -> str:
    (folder / "mine.py").write_text(source)
    return str(folder / "mine.py")


def test_a_function_is_loaded_by_file_and_name(tmp_path: Path) -> None:
    source = (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n    x: int\n"
        "def f(prompts, completions):\n    return []\n"
    )
    assert load_function(f"{module(tmp_path, source)}:f")(prompts=[], completions=[]) == []


@pytest.mark.parametrize(
    ("source", "name", "sentence"),
    [
        ("def g(prompts, completions): ...\ndef _h(): ...\n", "f", "has no function 'f'; the functions there are g"),
        ("", "f", "the functions there are (none)"),
        ("f = 3\n", "f", "is not a function but 3 (int)"),
        ("def f(text): ...\n", "f", "must take (prompts, completions, **columns); its signature is f(text)"),
        ("1 / 0\n", "f", "cannot be run: ZeroDivisionError: division by zero"),
        ("def f(:\n", "f", "cannot be run: SyntaxError"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_a_sentence(tmp_path: Path, source: str, name: str, sentence: str) -> None:
    with pytest.raises(RewardError) as caught:
        load_function(f"{module(tmp_path, source)}:{name}")
    assert sentence in str(caught.value)


def test_a_missing_file_or_another_kind_of_name_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="there is no file"):
        load_function(f"{tmp_path / 'none.py'}:f")
    with pytest.raises(RewardError, match=r"is named as file.py:function; got 'reward'"):
        load_function("reward")


def test_in_virtual_time_a_function_is_called_on_the_loop() -> None:
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        assert threading.current_thread() is threading.main_thread()
        return [1.0, 2.0]

    assert run_virtual(FunctionReward(reward, decode).finish, TWO) == [1.0, 2.0]
