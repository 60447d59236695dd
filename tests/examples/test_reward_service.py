"""The example of a reward behind HTTP: its server keeps to the protocol, and a run that asks it trains."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import httpx
import pytest

from oppo.rewards import load_reward
from oppo.rewards.http import HttpReward, ServiceFailure
from tests.rewards.test_combined import finished

example = import_module("examples.09_reward_service")


@pytest.fixture
def url() -> Iterator[str]:
    with example.serving() as address:
        yield address


async def test_a_run_asks_the_server_for_the_scores_of_all_its_responses(url: str) -> None:
    reports = await example.train(url)
    assert [len(report.trained) for report in reports] == [16] * 3
    assert all(0 < report.score <= 1 for report in reports)


async def test_the_server_scores_each_completion(url: str) -> None:
    assert await HttpReward(url)(["a", "b"], ["one two", "three three"], gold=[1, 2]) == [1.0, 0.5]


@pytest.mark.parametrize("completions", [[""], [7], 7])
async def test_what_cannot_be_scored_is_refused_and_the_next_request_is_not(url: str, completions: list[str]) -> None:
    async with HttpReward(url) as service:
        with pytest.raises(ServiceFailure, match=r"answered 400 Bad Request: \{\"error\": \"\w+Error: "):
            await service(["a"], completions)
        assert await service(["a"], ["b"]) == [1.0]


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff"])
def test_any_request_is_answered(url: str, content: bytes) -> None:
    assert httpx.post(url, content=content).status_code == 400


async def test_it_is_named_in_a_settings_file(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_URL", url)
    file = Path(__file__).parents[2] / "examples" / "09_reward_service.py"
    reward = load_reward(f"{file}:service", lambda tokens: "same same")
    assert await reward.finish(finished(2)) == [0.5, 0.5]
