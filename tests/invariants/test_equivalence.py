"""The streamed graph against the serial oracle, with real models: in deterministic mode they agree bit for bit."""

from __future__ import annotations

import functools
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import anyio
import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oppo.admission import Overcommit
from oppo.admission.chunking import ChunkSize, Fixed, WholeRollout
from oppo.algorithms.ppo import ppo
from oppo.events import Batch, Prompt
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel, ValueModel
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.losses import token_logprobs
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.training import TrainerSettings
from tests.golden.make_schedules import CASES, PATH, RESUMED, digests
from tests.kit.known import known
from tests.kit.pipelines import Tap

SAMPLING = Sampling(max_new_tokens=40, temperature=0.9, stop=(1, 2, 3, 4, 5), seed=3)
SETTINGS = TrainerSettings(learning_rate=1e-3, epochs=2, minibatches=2)
BATCH = 4


def oracle() -> ModuleType:
    path = Path(__file__).parents[2] / "examples" / "00_serial_ppo.py"
    spec = importlib.util.spec_from_file_location("serial_ppo", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prompts() -> list[Prompt]:
    return [Prompt(n, n, np.arange(10 + n, 13 + n + n % 5, dtype=np.int32), group=n) for n in range(3 * BATCH)]


async def streamed(models: dict[str, PreTrainedModel], chunks: ChunkSize) -> list[Batch]:
    def one_core() -> None:
        torch.set_num_threads(1)

    with Thread("decode", setup=one_core) as decoding, Thread("score", setup=one_core) as scoring:
        policy = HfPolicy(models["actor"], sampling=SAMPLING, place=decoding, deterministic=True)
        critic = ValueModel(models["critic"], place=scoring, deterministic=True)
        graph = ppo(
            policy=policy,
            reference=ReferenceLogprobs(models["reference"], sampling=SAMPLING, place=scoring, deterministic=True),
            reward=RewardModel(models["reward"], place=scoring, deterministic=True),
            critic=critic,
            trainer=HfTrainer(models["actor"], models["critic"], sampling=SAMPLING, place=decoding, settings=SETTINGS),
            admission=Overcommit(batch=BATCH, overcommit=0),
            chunks=chunks,
        )
        tap = Tap()
        async with graph.open(prompts(), observers=[tap]) as run:
            async for _ in run.steps(3):
                pass
        return [item for _, _, item in tap.items if isinstance(item, Batch)]


def assert_same(serial: Sequence[Batch], other: Sequence[Batch]) -> None:
    assert len(serial) == len(other) == 3
    for a, b in zip(serial, other, strict=True):
        assert a.rollouts == b.rollouts
        for name in ("tokens", "logprobs", "reference", "values", "scores", "rewards", "advantages", "returns"):
            assert np.array_equal(getattr(a, name), getattr(b, name)), name


@functools.cache
def serial() -> tuple[list[Batch], dict[str, str]]:
    """Return the batches of the serial oracle, and the digests of what it has trained."""
    example = oracle()
    models = example.tiny_models()
    batches = anyio.run(example.serial_ppo, models, prompts(), BATCH, SAMPLING, SETTINGS)
    return batches, {name: weights_digest(models[name]) for name in ("actor", "critic")}


@pytest.mark.parametrize("chunks", [Fixed(1), Fixed(7), Fixed(32), WholeRollout()], ids=str)
def test_streamed_and_serial_runs_agree_bit_for_bit(chunks: ChunkSize) -> None:
    torch.set_num_threads(1)
    ours, untrained = oracle().tiny_models(), oracle().tiny_models()
    batches, trained = serial()
    assert_same(batches, anyio.run(streamed, ours, chunks))
    for name in ("actor", "critic"):
        assert weights_digest(ours[name]) == trained[name], name
        assert weights_digest(ours[name]) != weights_digest(untrained[name]), f"{name} was not trained"


def test_the_first_batch_agrees_with_the_plain_library_forward() -> None:
    torch.set_num_threads(1)
    models = oracle().tiny_models()
    with torch.no_grad():
        (first, *_) = anyio.run(streamed, models, Fixed(7))
        fresh = oracle().tiny_models()
        for response, row, score in zip(first.responses, first.rows(), first.scores, strict=True):
            ids = torch.from_numpy(np.concatenate((response.prompt.tokens, response.tokens))).long()[None]
            start = len(response.prompt.tokens)
            logits = fresh["actor"](ids).logits[0, start - 1 : -1]
            expected = token_logprobs(logits, ids[0, start:], SAMPLING.temperature).numpy()
            for got in (first.logprobs[row], known(first.reference)[row]):
                np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)
            critic = fresh["critic"]
            hidden = critic.base_model(ids).last_hidden_state
            values = critic.score(hidden)[0, start - 1 : -1, 0].numpy()
            np.testing.assert_allclose(known(first.values)[row], values, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(score, fresh["reward"](ids).logits[0, 0].numpy(), rtol=1e-5, atol=1e-5)


RECORDED = json.loads(PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_a_run_without_lookahead_is_bit_for_bit_the_one_that_was_recorded(case: str) -> None:
    assert digests(CASES[case]) == RECORDED[case]


def test_a_resumed_one_is_too() -> None:
    case, first = RESUMED
    assert digests(CASES[case], first) == RECORDED[f"{case}, resumed"]
