"""Several rewards as one: weights, what does not apply, drops, models beside functions, metrics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import anyio
import pytest

from oppo.errors import ConfigError, RewardError
from oppo.events import Drop, Finish
from oppo.rewards import FunctionReward, Rewards, Weighted, load_reward
from oppo.rewards.combined import NONE_APPLIES
from oppo.rewards.function import DOES_NOT_APPLY
from oppo.scheduling import Urgent
from oppo.testing import FakeScorer, check_scorer, fake_scalar, run_virtual
from tests.pipelines import Pipeline, Setting, same_batches
from tests.responses import responses

MIXED = Setting(lengths=(5, 9, 3, 30), extra=1, steps=3)


def length(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    return [float(len(each)) for each in completions]


def third(prompts: Sequence[str], completions: Sequence[str]) -> list[float | None]:
    """Apply to those of an even length."""
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
    samples = rewards.samples()
    even = [n for n in lengths() if n % 2 == 0]
    assert samples["reward/long_mean"] == lengths()
    assert samples["reward/long_share"] == [1.0] * 6
    assert samples["reward/third_share"] == [float(n % 2 == 0) for n in lengths()]
    assert samples["reward/third_mean"] == [n / 3 for n in even]
    assert rewards.samples() == {}


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


def test_parts_are_asked_at_the_same_time() -> None:
    async def slow(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        await anyio.sleep(5)
        return [1.0 for _ in prompts]

    async def main() -> float:
        await Rewards({"one": (1, slow), "two": (1, slow)}, decode=str).finish(finished())
        return anyio.current_time()

    assert run_virtual(main) == 5


def test_a_model_is_streamed_into_beside_functions_and_the_metrics_are_in_the_report() -> None:
    model: FakeScorer[float | Drop] = FakeScorer(fake_scalar, 0.001, 0.001)
    alone, mixed = Pipeline(MIXED), Pipeline(MIXED)
    alone.reward = FakeScorer(fake_scalar, 0.001, 0.001)
    mixed.reward = Rewards({"model": (1.0, model), "nothing": (1.0, zero)}, decode=str)
    run_virtual(alone.run)
    run_virtual(mixed.run)
    assert same_batches(alone.batches, mixed.batches)
    for report in mixed.reports:
        assert report.metrics["reward/model_mean"] == pytest.approx(report.score, rel=1e-6)
        assert report.metrics["reward/nothing_mean"] == 0
        assert report.metrics["reward/nothing_share"] == 1


async def zero(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    await anyio.sleep(0.05)
    return [0.0 for _ in prompts]


def test_it_is_a_scorer_as_the_protocol_says() -> None:
    def make() -> Rewards:
        return Rewards({"model": (0.5, FakeScorer(fake_scalar)), "long": (0.01, length)}, decode=str)

    async def made() -> Rewards:
        return make()

    run_virtual(check_scorer, made, finished(), lambda one, other: one == other)


def test_an_urgent_call_reaches_models_as_one() -> None:
    class Ranked(FakeScorer[float | Drop]):
        seen: ClassVar[list[object]] = []

        async def extend(self, events: object, *, priority: object = None) -> None:
            self.seen.append(priority)

        async def forget(self, rollouts: object, *, priority: object = None) -> None:
            self.seen.append(priority)

        async def finish(self, finished: Sequence[Finish], *, priority: object = None) -> list[float | Drop]:
            self.seen.append(priority)
            return [1.0 for _ in finished]

    async def main() -> None:
        ranked = Ranked(fake_scalar)
        with Urgent() as urgent:
            assert await Rewards({"model": (2, ranked)}).finish(finished(2), priority=urgent) == [2.0, 2.0]
        assert ranked.seen == [urgent]

    run_virtual(main)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({}, "Rewards sums several rewards, and got none"),
        ({"long": length}, r"reward 'long' must be a weight and a reward, \(0.5, function\); got <function"),
        ({"long": ("much", length)}, "the weight of reward 'long' must be a finite number, not 'much'"),
        ({"long": (1, length)}, "reward 'long' is a function, which reads text: give Rewards the tokenizer's decode"),
    ],
)
def test_what_is_no_sum_of_rewards_is_refused(parts: dict[str, Weighted], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        Rewards(parts)


SEVERAL = """
def length(prompts, completions):
    return [float(len(each)) for each in completions]


several = {"long": (0.5, length), "half": (1.0, length)}
number = 7
"""


def test_a_file_names_a_function_several_rewards_or_a_scorer(tmp_path: Path) -> None:
    file = tmp_path / "judges.py"
    file.write_text(SEVERAL + "from oppo.rewards import Rewards\nscorer = Rewards(several, decode=str)\n")
    expected = [1.5 * n for n in lengths()]
    for name in ("several", "scorer"):
        assert run_virtual(load_reward(f"{file}:{name}", str).finish, finished()) == expected
    assert isinstance(load_reward(f"{file}:length", str), FunctionReward)
    with pytest.raises(RewardError, match=r"judges.py:number is not a function but 7 \(int\)"):
        load_reward(f"{file}:number", str)
    with pytest.raises(RewardError, match="holds several rewards, which are called in this process"):
        load_reward(f"{file}:several", str, process=True)


def test_carried_rollouts_are_scored_once(tmp_path: Path) -> None:
    carried = replace(MIXED, lengths=(5, 9, 3, 60), extra=2, steps=4)
    pipeline = Pipeline(carried)
    pipeline.reward = Rewards({"long": (1, length), "model": (1, FakeScorer(fake_scalar))}, decode=str)
    run_virtual(pipeline.run)
    assert any(report.deferred for report in pipeline.reports)
    trained = [rollout for report in pipeline.reports for rollout in report.trained]
    assert len(trained) == len(set(trained)) == 4 * carried.batch
