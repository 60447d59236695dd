"""A reward function: its arguments, scores and failures, calls that overlap, and its life in a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import anyio
import anyio.lowlevel
import anyio.to_thread
import numpy as np
import pytest
import torch

from oppo.admission import Overcommit
from oppo.algorithms.ppo import ppo
from oppo.environments import FunctionEnvironment, TextTurn
from oppo.errors import ConfigError, ModelError, RewardError
from oppo.events import Batch, Drop
from oppo.log import logger, routed
from oppo.models import Scorer
from oppo.rewards import FunctionReward, OnFailure, RewardFailure, Rewards, Weighted, load_function, load_reward
from oppo.testing import (
    FakeCritic,
    FakePolicy,
    FakeScorer,
    FakeTrainer,
    Fault,
    FaultyScorer,
    Raise,
    fake_per_token,
    prompts,
    run_virtual,
)
from tests.kit.pipelines import Pipeline, Setting
from tests.kit.responses import ended
from tests.rewards.test_combined import finished, length


def decode(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens))


TWO = [ended(3, [5, 6], {"answer": "x", "level": 1}), ended(8, [7], {"answer": "y"})]


async def test_a_function_gets_aligned_lists_and_the_columns_it_names() -> None:
    seen: dict[str, object] = {}

    def reward(prompts: list[str], completions: list[str], answer: list[str]) -> list[float]:
        seen.update(prompts=prompts, completions=completions, answer=answer, thread=threading.current_thread().name)
        return [1.0, 2.0]

    assert await FunctionReward(reward, decode).finish(TWO) == [1.0, 2.0]
    assert seen.pop("thread") != threading.current_thread().name
    assert seen == {"prompts": ["1 2", "1 2"], "completions": ["5 6", "7"], "answer": ["x", "y"]}


async def test_an_async_function_is_awaited_on_the_loop() -> None:
    async def reward(prompts: list[str], completions: list[str]) -> list[float]:
        assert threading.current_thread() is threading.main_thread()
        return [float(len(each)) for each in completions]

    assert await FunctionReward(reward, decode).finish(TWO) == [3.0, 1.0]


async def test_scores_may_have_a_gradient_and_a_failure_says_what_may_be_done(recwarn: pytest.WarningsRecorder) -> None:
    many, weight = [ended(number, [5]) for number in range(12)], torch.ones(12, requires_grad=True)
    assert await FunctionReward(lambda prompts, completions: weight, decode).finish(many) == [1.0] * 12
    assert not recwarn.list
    with pytest.raises(RewardError, match=r"\(rollouts 0, 1, 2, 3, 4, 5, 6, 7 and 4 more\)") as caught:
        await FunctionReward(lambda prompts, completions: None, decode).finish(many)
    assert "'drop' leaves out what fails" in caught.value.__notes__[0]


async def test_nothing_finished_calls_nothing() -> None:
    assert await FunctionReward(lambda prompts, completions: 1 / 0, decode).finish([]) == []


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ([1.0, None], "for rollout 8 it returned None (NoneType)"),
        ([float("nan"), 1.0], "for rollout 3 it returned nan (float)"),
        ([1.0, float("inf")], "for rollout 8 it returned inf (float)"),
        ([1.0, "2"], "for rollout 8 it returned '2' (str)"),
        (
            [1.0, [2.0, 3.0]],
            "2 rewards for a completion of 1 token, each of which a list rewards: its score is a number (rollouts 8)",
        ),
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


@pytest.mark.parametrize(
    "scores", [np.array([0.25, 2.0], np.float32), np.array([[0.25], [2.0]]), torch.tensor([[0.25], [2.0]])]
)
async def test_an_array_or_a_column_of_numbers_is_a_score_for_each_completion(scores: object) -> None:
    found = await FunctionReward(lambda prompts, completions: scores, decode).finish(TWO)
    assert found == [0.25, 2.0]
    assert all(type(score) is float for score in found)


async def test_a_column_may_not_bear_the_name_of_an_argument() -> None:
    def reward(prompts: list[str], completions: list[str]) -> list[float]:
        raise AssertionError

    with pytest.raises(RewardError, match="column 'completions' bears the name"):
        await FunctionReward(reward, decode).finish([ended(0, [5], {"completions": 1})])


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


@pytest.mark.parametrize("policy", ["fail", "drop", "retry"])
async def test_a_function_that_does_not_fit_the_data_is_a_fault_under_every_policy(policy: OnFailure) -> None:
    def reward(prompts: list[str], completions: list[str], gold: list[str]) -> list[float]:
        raise AssertionError

    with pytest.raises(RewardError, match=r"asks for 'gold', which is no column of the data; .* answer, level"):
        await FunctionReward(reward, decode, on_failure=policy).finish(TWO)


@pytest.mark.parametrize("times", [2, 9])
def test_a_retry_waits_longer_each_time_and_the_last_fails_with_the_number_of_attempts(times: int) -> None:
    called: list[float] = []

    async def reward(prompts: list[str], completions: list[str]) -> list[float]:
        called.append(anyio.current_time())
        if len(called) <= times:
            raise ConnectionError("the judge is away")
        return [1.0 for _ in completions]

    judge = FunctionReward(reward, decode, on_failure="retry")
    if times == 2:
        assert run_virtual(judge.finish, TWO) == [1.0, 1.0]
    else:
        with pytest.raises(RewardError, match="the judge is away") as caught:
            run_virtual(judge.finish, TWO)
        assert caught.value.__notes__ == ["it was the last of 4 attempts"]
    assert called == [0.0, 1.0, 6.0, 31.0][: times + 1]


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


EACH_LATER = Setting(lengths=tuple(range(5, 21)), batch=16, steps=1)
"""16 responses, each of which ends a decode step after the one before."""


@pytest.mark.parametrize("each", [False, True])
def test_a_step_waits_for_the_slowest_call_and_not_for_their_sum(each: bool) -> None:
    calls = list[int]()

    async def slow(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        calls.append(len(prompts))
        await anyio.sleep(5)
        return [1.0 for _ in prompts]

    def seconds(concurrency: int | None) -> float:
        calls.clear()
        pipeline = Pipeline(EACH_LATER)
        reward = FunctionReward(slow, decode=str, each=each, concurrency=concurrency)
        pipeline.reward = reward
        run_virtual(pipeline.run)
        return pipeline.reports[0].seconds

    decoding = 20 * 0.01
    assert seconds(None) == pytest.approx(decoding + 5, abs=0.02)
    assert calls == [1] * 16
    assert seconds(1) == pytest.approx(16 * 5 + 0.05 if each else 2 * 5 + 0.05, abs=0.1)


def test_as_many_calls_overlap_as_were_asked_for() -> None:
    now = most = 0

    async def counted(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await anyio.sleep(1)
        now -= 1
        return [1.0 for _ in prompts]

    async def main() -> float:
        start = anyio.current_time()
        await FunctionReward(counted, decode=str, each=True, concurrency=3).finish(finished(8))
        return anyio.current_time() - start

    assert run_virtual(main) == 3
    assert most == 3


def sleeping(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    time.sleep(60)
    return [0.5 for _ in prompts]


LATE = "reward function 'forever' took longer than 3 s (rollouts {})"


def test_a_call_that_takes_too_long_is_dropped_or_made_again_as_any_that_failed(messages: list[str]) -> None:

    async def forever(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        await anyio.sleep_forever()
        return []

    async def dropped() -> list[float | Drop]:
        reward = FunctionReward(forever, decode=str, timeout=3, on_failure="drop")
        return await reward.finish(finished(2))

    async def again() -> None:
        reward = FunctionReward(forever, decode=str, timeout=3, on_failure="retry")
        await reward.finish(finished(1))

    drops = run_virtual(dropped)
    assert [isinstance(each, Drop) and each.reason == LATE.format(each.rollout) for each in drops] == [True, True]
    with pytest.raises(RewardFailure, match="took longer than 3 s"):
        run_virtual(again)
    assert len(messages) == 3


async def test_a_sync_call_that_takes_too_long_holds_nothing_up() -> None:
    release, calls = threading.Event(), list[int]()

    def slow(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        calls.append(len(prompts))
        if len(calls) == 1:
            release.wait(60)
        return [0.5 for _ in prompts]

    reward = FunctionReward(slow, decode=str, timeout=0.5)
    try:
        with pytest.raises(RewardFailure, match=r"took longer than 0.5 s"):
            await reward.finish(finished(1))
        assert await reward.finish(finished(1)) == [0.5]
        assert not release.is_set()
    finally:
        release.set()


@pytest.mark.parametrize(
    ("options", "message"),
    [({"concurrency": 0}, "concurrency must be at least 1, not 0"), ({"timeout": -1.0}, "timeout must be at least 0")],
)
def test_bad_numbers_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FunctionReward(sleeping, decode=str, **options)  # type: ignore[arg-type] # wrong on purpose


def test_what_is_scored_does_not_depend_on_how_many_calls_overlap() -> None:
    def scores(concurrency: int) -> list[list[float]]:
        async def lengths(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
            await anyio.sleep(0.01 * len(completions[0]))
            return [float(len(each)) for each in completions]

        pipeline = Pipeline(replace(EACH_LATER, batch=4, extra=2, steps=3))
        pipeline.reward = FunctionReward(lengths, decode=str, concurrency=concurrency)
        run_virtual(pipeline.run)
        return [batch.scores.tolist() for batch in pipeline.batches]

    assert scores(1) == scores(8)


@dataclass
class Service:
    """An async reward function that must be open when it is called."""

    opened: int = 0
    life: list[str] = field(default_factory=list)

    async def __aenter__(self) -> Self:
        self.opened += 1
        self.life.append("opened")
        return self

    async def __aexit__(self, *error: object) -> None:
        await anyio.lowlevel.checkpoint()
        self.opened -= 1
        self.life.append("closed")

    async def __call__(self, prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        assert self.opened
        await anyio.sleep(0.01)
        self.life += ["called"] * (self.life[-1] != "called")
        return [1.0 for _ in prompts]


def played(reward: object) -> None:
    pipeline = Pipeline(Setting(steps=2, extra=1))
    pipeline.reward = reward  # type: ignore[assignment] # a reward may drop
    run_virtual(pipeline.run)


def test_a_function_is_open_as_long_as_the_run() -> None:
    service = Service()
    reward = FunctionReward(service, decode=str)
    for _ in range(2):
        played(reward)
    assert service.life == ["opened", "called", "closed"] * 2


def test_one_that_is_in_several_parts_is_opened_and_closed_by_each() -> None:
    service = Service()
    parts: dict[str, Weighted] = {"one": (1.0, service), "two": (1.0, Rewards({"it": (1.0, service)}, decode=str))}
    played(Rewards(parts, decode=str))
    assert [each for each in service.life if each != "called"] == ["opened"] * 2 + ["closed"] * 2
    assert (service.opened, service.life[2], service.life[-3]) == (0, "called", "called")


def test_a_function_is_left_when_the_run_fails_and_even_when_its_end_does() -> None:
    service = Service()

    class Opened(FaultyScorer[float | Drop]):
        async def __aenter__(self) -> Self:
            await service.__aenter__()
            return self

        async def __aexit__(
            self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
        ) -> None:
            await service.__aexit__(kind, error, tb)

    script = (Fault("judge", "forget", Raise(ModelError)), Fault("judge", "finish", Raise(ModelError)))
    with pytest.raises(ModelError):
        played(Opened("judge", FunctionReward(length, decode=str), script))
    assert service.life == ["opened", "closed"]


def test_the_function_of_an_environment_is_open_as_long_as_the_run() -> None:
    class Tool(Service):
        async def __call__(self, turn: TextTurn) -> str:  # type: ignore[override] # of another kind of function
            assert self.opened == 1
            self.life += ["called"] * (self.life[-1] != "called")
            return "a"

    service = Tool()
    tool = FunctionEnvironment(service, str, lambda text: [7])
    pipeline = Pipeline(Setting(steps=2))
    pipeline.policy.turns = lambda prompt: (2,)
    pipeline.generate = replace(pipeline.generate, environment=tool)
    run_virtual(pipeline.run)
    assert service.life == ["opened", "called", "closed"]


def test_what_a_function_logs_goes_where_the_messages_of_the_run_go() -> None:
    def talkative(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        logger.info("scoring")
        return [1.0 for _ in prompts]

    async def both() -> None:
        reward = FunctionReward(talkative, decode=str)
        for number, said in enumerate((one, other), 1):
            with routed(said.append):
                await reward.finish(finished(number))

    one, other = list[str](), list[str]()
    anyio.run(both)  # in a thread of its own for each call
    assert (one, other) == (["scoring"], ["scoring"])


FILE = """
from tests.rewards.test_function import Service
from oppo.rewards import Rewards

judge = Service()
several = {"judge": (1.0, judge)}
scorer = Rewards(several, decode=str)
"""


@pytest.mark.parametrize("name", ["judge", "several", "scorer"])
def test_what_is_loaded_from_a_file_is_opened_for_each_run(tmp_path: Path, name: str) -> None:
    (tmp_path / "judges.py").write_text(FILE)
    for _ in range(2):
        assert run_virtual(scored, load_reward(f"{tmp_path / 'judges.py'}:{name}", str)) == [1.0, 1.0]


async def scored(reward: Scorer[float | Drop]) -> list[float | Drop]:
    async with reward:  # type: ignore[attr-defined] # those that are loaded here are context managers
        return list(await reward.finish(finished(2)))
