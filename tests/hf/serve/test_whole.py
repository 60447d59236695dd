"""Models that cannot continue a sequence: they score whole responses, exactly, beside a policy on another engine."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import cast

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.errors import ModelRefused
from oppo.events import Batch, Finish, FloatArray, IntArray, Prompt
from oppo.hf.introspection import backbone, score_head
from oppo.hf.kv.reader import WholeRows, reader_of
from oppo.hf.probe import probe
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.serve.scorers import RecomputedLogprobs, ReferenceLogprobs, RewardModel, ValueModel
from oppo.hf.shared_memory import SharedModel
from oppo.hf.train.trainer import HfTrainer
from oppo.hf.weights import weights_digest
from oppo.losses import PPOLoss
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.placement.wire import pack_with_blocks, unpack
from oppo.returns import Correction
from oppo.testing.conformance import check_scorer
from oppo.training import TrainerSettings
from oppo.vllm import VllmPolicy
from tests.hf import tiny
from tests.known import known
from tests.pipelines import Tap
from tests.responses import responses, stream
from tests.vllm.fake_engine import VOCABULARY, FakeAsyncLLM, engine_of, running

torch.set_num_threads(1)

SAMPLING = Sampling(max_new_tokens=30, temperature=0.7, stop=(2, 3))


@pytest.fixture(scope="module")
def thread() -> Iterator[Thread]:
    with Thread("scorers", setup=lambda: torch.set_num_threads(1)) as thread:
        yield thread


@tiny.apart
def causal(name: str, *, vocabulary: int = tiny.VOCABULARY) -> PreTrainedModel:
    config = tiny.ONLY_WHOLE[name]()
    config.vocab_size = vocabulary
    model = tiny.of(config)
    assert probe(model) == "whole"
    return model


@tiny.apart
def scalar(name: str, *, vocabulary: int = tiny.VOCABULARY, seed: int = 2) -> PreTrainedModel:
    config = tiny.ONLY_WHOLE[name]()
    config.vocab_size, config.num_labels = vocabulary, 1
    model = tiny.scalar_of(config, seed=seed)
    assert probe(model) == "whole"
    return model


@tiny.apart
@torch.no_grad()
def logprobs(model: PreTrainedModel, prompt: IntArray, tokens: IntArray) -> FloatArray:
    """Return the log-probs of a response by one forward pass of transformers over it alone."""
    ids = torch.from_numpy(np.concatenate((prompt, tokens)).astype(np.int64))[None]
    logits = model(ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float() / SAMPLING.temperature
    found: FloatArray = logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()
    return found


@tiny.apart
@torch.no_grad()
def values(model: PreTrainedModel, prompt: IntArray, tokens: IntArray) -> FloatArray:
    """Return the score at each position from the last of the prompt on, likewise."""
    ids = torch.from_numpy(np.concatenate((prompt, tokens)).astype(np.int64))[None]
    hidden = backbone(model)(ids, use_cache=False).last_hidden_state
    found: FloatArray = score_head(model)(hidden)[0, len(prompt) - 1 :, 0].float().numpy()
    return found


def assert_close(got: object, want: object) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", tiny.ONLY_WHOLE)
async def test_whole_responses_are_scored_as_one_forward_pass_would(
    name: str, deterministic: bool, thread: Thread
) -> None:
    model, made = causal(name), responses()
    scorer = ReferenceLogprobs(model, sampling=SAMPLING, place=thread, deterministic=deterministic)
    found = await stream(scorer, made, seed=1)
    for response in made:
        assert_close(found[response.prompt.rollout], logprobs(model, response.prompt.tokens, response.tokens))
    with pytest.raises(ModelRefused, match=r"not decode here: vLLM .*models\.engine = 'vllm'"):
        HfPolicy(model, sampling=SAMPLING, place=thread)


async def test_whole_readers_keep_to_the_contract_of_scorers_and_to_the_bits_of_a_rollout(thread: Thread) -> None:
    model, made = causal("jamba"), responses()

    async def reference() -> ReferenceLogprobs:
        return ReferenceLogprobs(model, sampling=SAMPLING, place=thread, deterministic=True)

    await check_scorer(reference, [Finish(each.prompt.rollout, each, "eos") for each in made], np.array_equal)


def test_a_whole_reader_in_another_process_knows_that_it_is_one() -> None:
    crossed = cast("SharedModel[PreTrainedModel]", unpack(pack_with_blocks(SharedModel(causal("mamba")))))
    assert isinstance(reader_of(crossed.load()), WholeRows)


def one_core() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize(("actor", "others"), [("jamba", "minimax"), ("mamba", "jamba"), ("rwkv", "bloom")])
async def test_a_ppo_step_beside_vllm_with_models_that_read_whole_responses(actor: str, others: str) -> None:
    """All of them but the engine's copy of the policy: what they score is what one forward pass of each says."""
    trained = causal(actor, vocabulary=VOCABULARY)
    reward, critic = (scalar(others, vocabulary=VOCABULARY, seed=seed) for seed in (2, 3))
    reference, before, old = copy.deepcopy(trained), copy.deepcopy(critic), weights_digest(trained)
    llm = FakeAsyncLLM(seconds=0.0)
    asked = [Prompt(n, n, np.arange(10 + n, 12 + 9 * n, dtype=np.int32)) for n in range(1, 6)]
    tap = Tap()
    with Thread("score", setup=one_core) as scoring, Thread("train", setup=one_core) as training:
        policy = VllmPolicy(engine_of(llm), sampling=SAMPLING)
        graph = ppo(
            policy=policy,
            reference=ReferenceLogprobs(reference, sampling=SAMPLING, place=scoring),
            reward=RewardModel(reward, place=scoring),
            critic=ValueModel(critic, place=scoring),
            proximal=RecomputedLogprobs(trained, sampling=SAMPLING, place=scoring),
            trainer=HfTrainer(
                trained,
                critic,
                sampling=SAMPLING,
                place=training,
                loss=PPOLoss(correction=Correction(ratio_base="proximal")),
                settings=TrainerSettings(learning_rate=1e-3, epochs=1, minibatches=1, micro_batch_tokens=200),
            ),
            admission=Overcommit(batch=4, overcommit=1),
            chunks=Fixed(7),
        )
        async with running(llm), graph.open(asked, observers=[tap]) as run:
            [report] = [report async for report in run.steps(1)]
    [batch] = [item for _, _, item in tap.items if isinstance(item, Batch)]
    for response, row, score in zip(batch.responses, batch.rows(), batch.scores, strict=True):
        prompt, tokens = response.prompt.tokens, response.tokens
        for column in (batch.reference, batch.proximal):
            assert_close(known(column)[row], logprobs(reference, prompt, tokens))
        assert_close(known(batch.values)[row], values(before, prompt, tokens)[:-1])
        assert_close(score, values(reward, prompt, tokens)[-1])
    assert len(batch) == 4
    assert report.metrics["val/ratio"] == pytest.approx(1, abs=1e-5)
    assert weights_digest(trained) != old
    assert all(parameter.isfinite().all() for parameter in trained.parameters())
    assert policy.version == 1
