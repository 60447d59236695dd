"""Calls of a reward function overlap; a step waits for the slowest, and one that takes too long has failed."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace

import anyio
import pytest

from oppo.errors import ConfigError
from oppo.events import Drop, Finish
from oppo.rewards import FunctionReward, RewardFailure
from oppo.testing import run_virtual
from tests.pipelines import Pipeline, Setting
from tests.responses import responses

EACH_LATER = Setting(lengths=tuple(range(5, 21)), batch=16, steps=1)
"""16 responses, each of which ends a decode step after the one before."""


def finished(count: int) -> list[Finish]:
    """Return so many finished rollouts."""
    return [Finish(each.prompt.rollout, each, "eos") for each in responses(count)]


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
