"""Several rewards as one: weights, what does not apply, drops, models beside functions, metrics."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import anyio
import anyio.lowlevel
import anyio.to_thread
import pytest

from oppo.errors import ConfigError, RewardError, SessionsLost
from oppo.events import Chunk, Drop, Finish, Prompt, ToolTokens
from oppo.observe import Span
from oppo.placement import Thread
from oppo.rewards import FunctionReward, Rewards, Weighted, load_reward
from oppo.rewards.combined import NONE_APPLIES
from oppo.rewards.function import DOES_NOT_APPLY
from oppo.scheduling import DEFAULT_TIME_SLICE, IN_ORDER, Preempted, Preemptible, Priority, TimeSlice, Urgent
from oppo.scorers import ScorerCapabilities
from oppo.testing import FakeScorer, check_scorer, fake_scalar, run_virtual
from tests.kit.pipelines import Pipeline, Setting, same_batches
from tests.kit.responses import responses

MIXED = Setting(lengths=(5, 9, 3, 30), extra=1, steps=3)


def length(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [float(len(each)) for each in completions]


def third(prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
    return [len(each) / 3 if len(each) % 2 == 0 else None for each in completions]


def never(prompts: Sequence[str], completions: Sequence[str]) -> list[None]:
    return [None for _ in completions]


def finished(count: int = 6) -> list[Finish]:
    return [Finish(each.prompt.rollout, each, "eos") for each in responses(count)]


def lengths() -> list[int]:
    return [len(str(each.response.tokens.tolist())) for each in finished()]


def scored(rewards: Rewards) -> list[float | Drop]:
    return run_virtual(rewards.finish, finished())


def test_the_sum_is_weighted_and_what_does_not_apply_adds_nothing() -> None:
    rewards = Rewards({"long": (0.5, length), "third": (3, third)}, decode=str)
    assert scored(rewards) == [0.5 * n + (n if n % 2 == 0 else 0) for n in lengths()]
    samples = rewards.capabilities.samples()
    even = [n for n in lengths() if n % 2 == 0]
    assert samples["rewards/long/mean"] == lengths()
    assert samples["rewards/long/share"] == [1.0] * 6
    assert samples["rewards/third/share"] == [float(n % 2 == 0) for n in lengths()]
    assert samples["rewards/third/mean"] == [n / 3 for n in even]
    assert rewards.capabilities.samples() == {}


def test_the_parts_of_an_agent_are_measured_once_whatever_its_conversations() -> None:
    rewards = Rewards({"long": (1.0, length)}, decode=str)
    first, second, *_ = finished()
    prompt = replace(second.response.prompt, rollout=first.rollout + 2**32, branch=1)
    further = Finish(prompt.rollout, replace(second.response, prompt=prompt), "eos")
    assert len(run_virtual(rewards.finish, [first, further])) == 2
    assert rewards.capabilities.samples() == {"rewards/long/mean": lengths()[:1], "rewards/long/share": [1.0]}


def test_a_rollout_to_which_nothing_applies_is_dropped() -> None:
    assert scored(Rewards({"never": (1, never)}, decode=str)) == [Drop(n, NONE_APPLIES) for n in range(6)]


def test_a_function_alone_may_not_apply_either() -> None:
    reward = FunctionReward(never, decode=str, optional=True)
    assert run_virtual(reward.finish, finished(2)) == [Drop(0, DOES_NOT_APPLY), Drop(1, DOES_NOT_APPLY)]
    with pytest.raises(
        RewardError, match="must return a finite number for each completion; for rollout 0 it returned N"
    ):
        run_virtual(FunctionReward(never, decode=str).finish, finished(2))


def failing(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    raise ValueError("no judge")


def test_a_drop_of_a_part_drops_the_rollout_or_leaves_it_to_the_others() -> None:
    parts: dict[str, Weighted] = {"long": (1, length), "judge": (1, failing)}
    dropped = scored(Rewards(parts, decode=str, on_failure="drop"))
    assert all(isinstance(each, Drop) and each.reason.startswith("judge: reward function") for each in dropped)
    assert scored(Rewards(parts, decode=str, on_failure="drop", on_drop="skip")) == [float(n) for n in lengths()]
    with pytest.raises(RewardError, match="reward function 'judge' raised ValueError: no judge"):
        scored(Rewards(parts, decode=str))


class Unhurried(FakeScorer[float | Drop]):
    """Takes a second for whatever it does; its first call for a rollout may be preempted."""

    def __init__(self, *, preempted: bool = False) -> None:
        super().__init__(fake_scalar)
        self.preempted = preempted
        self.asked: list[tuple[str, Priority]] = []

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
        self.asked.append(("extend", priority))
        await anyio.sleep(1)
        if self.preempted:
            self.preempted = False
            raise Preempted
        await super().extend(events)

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        self.asked.append(("forget", priority))
        await anyio.sleep(1)
        await super().forget(rollouts)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[float | Drop]:
        self.asked.append(("finish", priority))
        return await super().finish(finished)


async def slow(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    await anyio.sleep(5)
    return [1.0 for _ in prompts]


def test_parts_read_forget_and_are_asked_at_the_same_time() -> None:
    one, two = Unhurried(), Unhurried()
    rewards = Rewards({"one": (1, one), "two": (1, two), "slow": (1, slow), "other": (1, slow)}, decode=str)

    async def main() -> list[float]:
        times = []
        for work in (
            rewards.extend([each.response.prompt for each in finished()]),
            rewards.extend([each.response.chunk() for each in finished()]),
            rewards.forget([0, 1]),
            rewards.finish(finished()[2:]),
        ):
            await work
            times.append(anyio.current_time())
        return times

    assert run_virtual(main) == [1, 2, 3, 8]
    assert not one.sessions.keys() | two.sessions.keys()


@pytest.mark.parametrize("both", [False, True])
def test_a_call_that_one_part_has_made_is_made_by_all_and_given_up_by_all_otherwise(both: bool) -> None:
    one, two = Unhurried(preempted=True), Unhurried(preempted=both)
    rewards = Rewards({"one": (1, one), "two": (1, two), "function": (1, length)}, decode=str)
    prompts = [each.response.prompt for each in finished()]
    priority = Preemptible(lambda: False)

    async def main() -> None:
        if both:
            with pytest.raises(Preempted):
                await rewards.extend(prompts, priority=priority)
            assert not one.sessions
            assert not two.sessions
        await rewards.extend(prompts, priority=priority)
        assert set(one.sessions) == set(two.sessions) == set(range(6))

    run_virtual(main)
    assert one.asked == 2 * [("extend", priority)]
    assert two.asked == (1 + both) * [("extend", priority)]


async def test_an_urgent_call_reaches_models_as_one() -> None:
    model = Unhurried()
    with Urgent() as urgent:
        await Rewards({"model": (2, model)}).finish([], priority=urgent)
    assert model.asked == [("finish", urgent)]


class Core:
    """A model in a place: it works for as long as its gate is closed."""

    def __init__(self) -> None:
        self.gate, self.begun = threading.Event(), threading.Event()

    def work(self) -> None:
        self.begun.set()
        self.gate.wait(30)


class Placed(FakeScorer[float | Drop]):
    """A model in a place that others share; its ``finish`` gets there when it is let go."""

    def __init__(self, place: Thread, core: Core) -> None:
        super().__init__(fake_scalar)
        self.core, self.let = core, anyio.Event()
        self.hosted = place.host(lambda: core)

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None:
        await self.hosted.at(priority).call("extend", lambda core: None)

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None:
        await self.hosted.at(priority).call("forget", lambda core: None)

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> Sequence[float | Drop]:
        await self.let.wait()
        await self.hosted.at(priority).call("finish", Core.work)
        return [1.0 for _ in finished]


async def test_an_urgent_call_waits_for_the_turns_of_all_parts_before_it_holds_their_place() -> None:
    with Thread("scorers") as place:
        one, two, other = Placed(place, Core()), Placed(place, Core()), place.host(Core)
        two.core.gate.set()
        rewards = Rewards({"one": (1, one), "two": (1, two), "function": (1, length)}, decode=str)
        with anyio.fail_after(20):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(rewards.finish, finished(1))
                one.let.set()
                await anyio.to_thread.run_sync(one.core.begun.wait, 10)

                async def urgent() -> None:
                    with Urgent() as priority:
                        await rewards.extend([], priority=priority)

                tasks.start_soon(urgent)
                tasks.start_soon(other.call, "long", lambda core: threading.Event().wait(0.2))
                await anyio.lowlevel.checkpoint()
                two.let.set()  # its call comes after the long one
                await anyio.lowlevel.checkpoint()
                one.core.gate.set()


def test_a_model_is_streamed_into_beside_functions_and_the_metrics_are_in_the_report() -> None:
    model: FakeScorer[float | Drop] = FakeScorer(fake_scalar, 0.001, 0.001)
    alone, mixed = Pipeline(MIXED), Pipeline(MIXED)
    alone.reward = FakeScorer(fake_scalar, 0.001, 0.001)
    mixed.reward = Rewards({"model": (1.0, model), "nothing": (1.0, zero)}, decode=str)
    run_virtual(alone.run)
    run_virtual(mixed.run)
    assert same_batches(alone.batches, mixed.batches)
    for report in mixed.reports:
        assert report.metrics["rewards/model/mean"] == pytest.approx(report.score, rel=1e-6)
        assert report.metrics["rewards/nothing/mean"] == 0
        assert report.metrics["rewards/nothing/share"] == 1


async def zero(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    await anyio.sleep(0.05)
    return [0.0 for _ in prompts]


def test_what_parts_measure_and_how_long_their_calls_should_last_is_handed_on() -> None:
    class Measuring(FakeScorer[float | Drop]):
        capabilities = ScorerCapabilities(
            time_slice=TimeSlice(seconds=0.1), samples=lambda: {"bridge/read_again": [3.0]}
        )

    rewards = Rewards({"one": (1, Measuring(fake_scalar)), "two": (1, Rewards({"m": (1, Measuring(fake_scalar))}))})
    assert rewards.capabilities.samples() == {"bridge/read_again": [3.0, 3.0]}
    assert rewards.capabilities.time_slice == TimeSlice(seconds=0.1)
    assert Rewards({"function": (1, length)}, decode=str).capabilities.time_slice == DEFAULT_TIME_SLICE


def test_it_is_a_scorer_as_the_protocol_says() -> None:
    async def make() -> Rewards:
        return Rewards({"model": (0.5, FakeScorer(fake_scalar)), "long": (0.01, length)}, decode=str)

    run_virtual(check_scorer, make, finished(), lambda one, other: one == other)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "Rewards sums several rewards, and got none"),
        ({"long": length}, r"reward 'long' must be a weight and a reward, \(0.5, function\); got <function"),
        ({"long": ("much", length)}, "the weight of reward 'long' must be a number, not 'much'"),
        ({"long": (1, length)}, "reward 'long' is a function, which reads text: give Rewards the tokenizer's decode"),
    ],
)
def test_what_is_no_sum_of_rewards_is_refused(parts: dict[str, Weighted], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Rewards(parts)
    with pytest.raises(ConfigError, match="on_drop names lnog; the rewards are long"):
        Rewards({"long": (1, length)}, decode=str, on_drop={"lnog": "skip"})


APART = """
import os

def pid(prompts, completions):
    return [float(os.getpid()) for _ in completions]

async def here(prompts, completions):
    return [float(os.getpid()) for _ in completions]

parts = {"apart": (1, pid), "here": (1, here)}
unnamed = {"lambda": (1, lambda prompts, completions: [])}
"""


async def test_the_sync_functions_of_several_rewards_may_be_called_in_processes(tmp_path: Path) -> None:
    (tmp_path / "judges.py").write_text(APART)
    rewards = load_reward(f"{tmp_path / 'judges.py'}:parts", str, process=True)
    assert isinstance(rewards, Rewards)
    with closing(rewards):
        await rewards.finish(finished(2))
        samples = rewards.capabilities.samples()
        assert set(samples["rewards/here/mean"]) == {float(os.getpid())} != set(samples["rewards/apart/mean"])
    with pytest.raises(RewardError, match="reward function 'lambda': this cannot go to another process"):
        load_reward(f"{tmp_path / 'judges.py'}:unnamed", str, process=True)


PLACED = """
from oppo.log import logger
from tests.rewards.test_combined import length
from oppo.testing import FakeScorer

class Core:
    def score(self, text):
        return float(len(text))

class Longest(FakeScorer):
    def __init__(self, place, decode):
        super().__init__(None)
        self.hosted, self.text = place.host(Core), decode

    async def finish(self, finished):
        texts = [self.text(each.response.tokens.tolist()) for each in finished]
        return [await self.hosted.call("score", Core.score, text) for text in texts]

def made(place, decode):
    logger.info("made")
    return Longest(place, decode)

parts = {"placed": (2, made), "length": (1, length)}

def nothing(place):
    return 7

def broken(place):
    raise OSError("no model here")
"""


@pytest.mark.parametrize(("name", "factor"), [("Longest", 1), ("made", 1), ("parts", 3)])
async def test_a_file_may_make_a_scorer_in_the_place_of_the_run(
    tmp_path: Path, name: str, factor: int, messages: list[str]
) -> None:
    (tmp_path / "judges.py").write_text(PLACED)
    spans = list[Span]()
    with Thread("scorers") as place:
        place.listener = spans.append
        reward = load_reward(f"{tmp_path / 'judges.py'}:{name}", str, place=place)
        assert await reward.finish(finished()) == [factor * float(n) for n in lengths()]
    assert [span.label for span in spans] == ["score"] * 6
    assert messages == ["made"] * (name != "Longest")


class Doubled:
    def score(self, count: int) -> float:
        return 2.0 * count


class Prioritised:
    version = 0

    def __init__(self, place: Thread) -> None:
        self.hosted = place.host(Doubled)

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None: ...

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> list[float | Drop]:
        hosted = self.hosted.at(priority)
        return [await hosted.call("double", Doubled.score, len(each.response)) for each in finished]

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None: ...


async def test_a_scorer_that_takes_no_priority_does_not_wait_for_one_that_holds_their_common_place(
    tmp_path: Path,
) -> None:
    (tmp_path / "judges.py").write_text(PLACED)
    with Thread("scorers") as place, anyio.fail_after(10):
        longest = load_reward(f"{tmp_path / 'judges.py'}:Longest", str, place=place)
        rewards = Rewards({"model": (1, Prioritised(place)), "longest": (1, longest)}, decode=str)
        with Urgent() as priority:
            await rewards.extend([each.response.prompt for each in finished()], priority=priority)
            total = await rewards.finish(finished(), priority=priority)
    assert total == [2 * len(each.response) + n for each, n in zip(finished(), lengths(), strict=True)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "judges.py:nothing takes a place, so it must return a scorer, with extend, finish and forget; got"),
        ("broken", r"judges.py:broken raised OSError: no model here at .*judges.py:\d+ in broken"),
    ],
)
def test_what_makes_no_scorer_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "judges.py").write_text(PLACED)
    with Thread("scorers") as place, pytest.raises(RewardError, match=message):
        load_reward(f"{tmp_path / 'judges.py'}:{name}", str, place=place)
    with pytest.raises(RewardError, match="makes a scorer in a place, and got none"):
        load_reward(f"{tmp_path / 'judges.py'}:{name}", str)


def test_functions_are_not_called_again_when_a_model_beside_them_has_lost_its_sessions() -> None:
    calls: list[int] = []

    def counted(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        calls.append(len(completions))
        return [0.0 for _ in completions]

    class Mortal(FakeScorer[float | Drop]):
        dies = True

        async def finish(self, finished: Sequence[Finish]) -> Sequence[float | Drop]:
            if self.dies:
                self.dies = False
                self.sessions.clear()
                await anyio.sleep(1)
                raise SessionsLost("'model' was lost, and works again")
            return await super().finish(finished)

    alone, disturbed = Pipeline(MIXED), Pipeline(MIXED)
    alone.reward = FakeScorer(fake_scalar)
    disturbed.reward = Rewards({"model": (1.0, Mortal(fake_scalar)), "counted": (1.0, counted)}, decode=str)
    run_virtual(alone.run)
    run_virtual(disturbed.run)
    assert same_batches(alone.batches, disturbed.batches)
    assert sum(calls) == sum(len(batch) for batch in alone.batches)
