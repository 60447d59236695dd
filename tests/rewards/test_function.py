from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.to_thread
import numpy as np
import pytest
import torch

from oppo.admission import Overcommit
from oppo.algorithms.ppo import ppo
from oppo.errors import RewardError
from oppo.events import Batch, Chunk, Drop, Finish, Prompt, Response
from oppo.rewards import FunctionReward, OnFailure, load_function
from oppo.simulate.engine import run_virtual
from oppo.testing import FakeCritic, FakePolicy, FakeScorer, FakeTrainer, fake_per_token, prompts


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
        assert {name: columns[name] for name in ("answer", "level")} == {"answer": ["x", "y"], "level": [1, None]}
        return [0.0 for _ in zip(prompts, completions, strict=True)]

    assert await FunctionReward(reward, decode).finish(TWO) == [0.0, 0.0]


async def test_the_datas_own_prompt_is_handed_over_as_it_stands() -> None:
    chat = [{"role": "user", "content": "hello"}]

    def reward(prompts: list[object], completions: list[object]) -> list[float]:
        assert prompts == [chat]
        assert completions == [[{"role": "assistant", "content": "5"}]]
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
    ("returned", "message"),
    [
        ([1.0, None], "for rollout 8 it returned None (NoneType)"),
        ([float("nan"), 1.0], "for rollout 3 it returned nan (float)"),
        ([1.0, float("inf")], "for rollout 8 it returned inf (float)"),
        ([1.0, "2"], "for rollout 8 it returned '2' (str)"),
        ([1.0, [2.0, 3.0]], "2 rewards for a completion of 1 tokens (rollouts 8)"),
        ([1.0, np.ones((1, 2))], "for rollout 8 it returned array([[1., 1.]]) (ndarray)"),
        ([1.0], "must return 2 numbers, one for each completion, in a list; got 1"),
        (1.0, "must return 2 numbers, one for each completion, in a list; got 1.0 (float)"),
        (None, "got None (NoneType)"),
        ("ab", "got 'ab' (str)"),
        ({1: 1, 2: 2}, "got {1: 1, 2: 2} (dict)"),
    ],
)
async def test_what_is_no_score_stops_the_run(returned: object, message: str) -> None:
    def reward(prompts: list[str], completions: list[str]) -> object:
        return returned

    with pytest.raises(RewardError) as caught:
        await FunctionReward(reward, decode).finish(TWO)
    assert "'reward'" in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize("scores", [np.array, torch.tensor])
async def test_a_column_of_scores_is_a_score_for_each_completion(scores: Callable[..., object]) -> None:
    def reward(prompts: list[str], completions: list[str]) -> object:
        return scores([[0.25], [2.0]])

    assert await FunctionReward(reward, decode).finish(TWO) == [0.25, 2.0]


async def test_a_function_that_raises_is_named_with_its_rollouts() -> None:
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        raise KeyError("gold")

    with pytest.raises(
        RewardError, match=r"'reward' raised KeyError: 'gold' at .*test_function.py:\d+ in reward \(rollouts 3, 8\)"
    ) as caught:
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
    ("source", "name", "message"),
    [
        ("def g(prompts, completions): ...\ndef _h(): ...\n", "f", "has no 'f'; the functions and classes there are g"),
        ("", "f", "the functions and classes there are (none)"),
        ("f = 3\n", "f", "is not a function but 3 (int)"),
        ("def f(text): ...\n", "f", "must take (prompts, completions, **columns); its signature is f(text)"),
        ("1 / 0\n", "f", "cannot be run: ZeroDivisionError: division by zero"),
        ("def f(:\n", "f", "cannot be run: SyntaxError: invalid syntax (mine.py, line 1)"),
    ],
)
def test_a_function_that_cannot_be_loaded_is_an_error(tmp_path: Path, source: str, name: str, message: str) -> None:
    with pytest.raises(RewardError) as caught:
        load_function(f"{module(tmp_path, source)}:{name}")
    assert message in str(caught.value)


def test_a_missing_file_or_another_kind_of_name_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match="there is no file"):
        load_function(f"{tmp_path / 'none.py'}:f")
    with pytest.raises(RewardError, match=r"is named as file.py:function; got 'reward'"):
        load_function("reward")


def test_in_virtual_time_a_function_is_called_on_the_loop() -> None:
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        assert threading.current_thread() is threading.main_thread()
        return [1.0, 2.0]

    assert run_virtual(FunctionReward(reward, decode).finish, TWO) == [1.0, 2.0]


async def test_a_failure_is_dropped_for_the_rollouts_it_concerns_and_no_others() -> None:
    calls: list[int] = []

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        calls.append(len(completions))
        return [1 / (len(completion) - 1) for completion in completions]

    scored = await FunctionReward(reward, decode, on_failure="drop").finish(TWO)
    good, bad = scored
    assert good == 0.5
    assert isinstance(bad, Drop)
    assert bad.rollout == 8
    assert bad.reason.startswith("reward function 'reward' raised ZeroDivisionError: division by zero at ")
    assert sorted(calls) == [1, 1, 2], "after a failure each rollout is asked for alone"


async def test_what_is_no_score_is_dropped_with_its_reason() -> None:
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        return [float("nan") if completion == "7" else 2.0 for completion in completions]

    good, bad = await FunctionReward(reward, decode, on_failure="drop").finish(TWO)
    assert good == 2.0
    assert isinstance(bad, Drop)
    assert bad.reason.endswith("for rollout 8 it returned nan (float)")


@pytest.mark.parametrize("policy", ["drop", "retry"])
async def test_a_function_that_does_not_fit_the_data_is_a_fault_under_every_policy(policy: OnFailure) -> None:
    def reward(prompts: list[str], completions: list[str], gold: list[str]) -> list[float]:
        raise AssertionError

    with pytest.raises(RewardError, match="asks for 'gold', which is no column"):
        await FunctionReward(reward, decode, on_failure=policy).finish(TWO)


def failing(times: int) -> tuple[FunctionReward, list[float]]:
    """Return a reward that fails so often and is tried four times, and when it is called."""
    called: list[float] = []

    async def reward(prompts: list[str], completions: list[str]) -> list[float]:
        called.append(anyio.current_time())
        if len(called) <= times:
            raise ConnectionError("the judge is away")
        return [1.0 for _ in completions]

    return FunctionReward(reward, decode, on_failure="retry"), called


def test_a_retry_waits_longer_each_time_and_then_goes_on() -> None:
    reward, called = failing(2)
    assert run_virtual(reward.finish, TWO) == [1.0, 1.0]
    assert called == [0.0, 1.0, 6.0]


def test_the_last_retry_fails_with_the_number_of_attempts() -> None:
    reward, called = failing(9)
    with pytest.raises(RewardError, match="the judge is away") as caught:
        run_virtual(reward.finish, TWO)
    assert caught.value.__notes__ == ["it was the last of 4 attempts"]
    assert called == [0.0, 1.0, 6.0, 31.0]


async def test_a_function_that_never_returns_does_not_keep_a_cancelled_run() -> None:
    entered, release = threading.Event(), threading.Event()

    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        entered.set()
        release.wait(60)
        return [0.0 for _ in completions]

    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(FunctionReward(reward, decode).finish, TWO)
            await anyio.to_thread.run_sync(entered.wait, 60)
            tasks.cancel_scope.cancel()
        assert not release.is_set()
    finally:
        release.set()


def dropping(lengths: tuple[int, ...], on_failure: OnFailure = "drop") -> Sequence[Batch]:
    """Return the batches of a run whose reward fails for every third prompt."""

    def reward(prompts: list[str], completions: list[str], number: list[int]) -> list[float]:
        return [float("nan") if each % 3 == 0 else 1.0 for each in number]

    async def main() -> Sequence[Batch]:
        trainer = FakeTrainer()
        graph = ppo(
            policy=FakePolicy(lambda prompt: lengths[prompt.rollout % len(lengths)], 0.5),
            reference=FakeScorer(fake_per_token, 0.25),
            reward=FunctionReward(reward, decode, on_failure=on_failure),
            critic=FakeCritic(per_token=0.125),
            trainer=trainer,
            admission=Overcommit(batch=4, overcommit=2),
        )
        numbered = (replace(each, columns={"number": each.admission}) for each in prompts(100))
        taken: list[int] = []
        async with graph.open(numbered) as run:
            async for report in run.steps(6):
                taken += [*report.trained, *(drop.rollout for drop in report.dropped)]
        assert sorted(taken) == list(range(24)), "every rollout is trained once or recorded as dropped"
        return trainer.batches

    return run_virtual(main)


@pytest.mark.parametrize("lengths", [(3,), (3, 5, 40, 8, 2, 13)])
def test_a_batch_is_smaller_by_exactly_the_rollouts_that_are_dropped(lengths: tuple[int, ...]) -> None:
    batches = dropping(lengths)
    assert [len(batch) + len(batch.dropped) for batch in batches] == [4] * 6
    dropped = sorted(drop.rollout for batch in batches for drop in batch.dropped)
    assert dropped == [number for number in range(24) if number % 3 == 0]
    assert all("it returned nan" in drop.reason for batch in batches for drop in batch.dropped)
    assert all(batch.scores.tolist() == [1.0] * len(batch) for batch in batches)


def test_a_failure_that_is_not_dropped_ends_the_run() -> None:
    with pytest.raises(RewardError, match="for rollout 0 it returned nan"):
        dropping((3,), "fail")
