"""Scorers on the real engine and on a server, beside those on transformers; `make test-vllm` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen2Config

from oppo.errors import ConfigError
from oppo.hf.serve.scorers import ReferenceLogprobs, RewardModel, TeacherLogprobs
from oppo.models import Sampling
from oppo.placement import Thread
from oppo.returns import TopLogprobs
from oppo.testing import check_scorer
from oppo.vllm import VllmEngine, VllmLogprobs, VllmReward
from oppo.vllm.scorers import LOGPROBS, SCALAR, LogprobServer, RewardServer, VllmScorer
from tests.kit.responses import EOS, PADDING, VOCABULARY as SAMPLED, answered, endings, finishes, responses, stream
from tests.kit.workplace import tokenizer
from tests.vllm import scenario
from tests.vllm.real.conftest import VOCABULARY, scoring_server, tiny_actor
from tests.vllm.real.rollouts import TOLERANCE

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32


def saved(directory: Path, kind: type[LlamaConfig | Qwen2Config] = Qwen2Config) -> PreTrainedModel:
    """Return a tiny reward model that vLLM's kernels take, saved in a directory with a tokenizer."""
    config = kind(
        vocab_size=SAMPLED,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        pad_token_id=PADDING,
        bos_token_id=1,
        eos_token_id=EOS,
        initializer_range=0.2,
    )
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    made.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return made


@pytest.fixture(scope="module")
def scalar(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """Return a tiny reward model, and the directory it is saved in."""
    directory = tmp_path_factory.mktemp("reward")
    return saved(directory), directory


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    model, directory = tiny_actor(7), tmp_path_factory.mktemp("reference")
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return model, directory


@pytest.fixture(scope="module")
def rewarding(scalar: tuple[PreTrainedModel, Path]) -> Iterator[VllmEngine]:
    arguments = {**SCALAR, "dtype": "float32", "block_size": BLOCK}
    with VllmEngine.start(scalar[1], arguments=arguments, cores=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def reading(causal: tuple[LlamaForCausalLM, Path]) -> Iterator[VllmEngine]:
    arguments = {**LOGPROBS, "dtype": "float32", "block_size": BLOCK}
    with VllmEngine.start(causal[1], arguments=arguments, cores=1) as engine:
        yield engine


def assert_close(got: object, want: object) -> None:
    if isinstance(want, TopLogprobs):
        assert isinstance(got, TopLogprobs)
        assert_close(got.tokens, want.tokens)
        assert_close(got.top[:, :-1], want.top[:, :-1])
        assert_close(np.exp(got.top[:, -1]), np.exp(want.top[:, -1]))
        assert (got.ids == want.ids).mean() > 0.99
    else:
        np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=TOLERANCE)


async def test_they_do_what_the_fake_does(rewarding: VllmEngine, reading: VllmEngine) -> None:
    await scenario.pooling(rewarding, BLOCK, partial(anyio.sleep, 0.1))
    await scenario.reading(reading, BLOCK)


async def test_the_contract_is_kept(rewarding: VllmEngine, reading: VllmEngine) -> None:
    async def make_reward() -> VllmReward:
        return VllmReward(rewarding)

    async def make_reference() -> VllmLogprobs:
        return VllmLogprobs(reading, sampling=Sampling(max_new_tokens=128))

    def close(one: object, other: object) -> bool:
        return bool(np.allclose(np.asarray(one), np.asarray(other), rtol=0, atol=TOLERANCE))

    made = finishes([each for each in responses(8) if len(each) >= 4])
    await check_scorer(make_reward, made, close)
    await check_scorer(make_reference, made, close)


@pytest.mark.parametrize("pad", [PADDING, EOS, None], ids=["padding", "eos", "none"])
async def test_a_streamed_score_is_that_of_one_request_and_of_transformers(
    pad: int | None, scalar: tuple[PreTrainedModel, Path], rewarding: VllmEngine, thread: Thread
) -> None:
    scalar[0].config.pad_token_id = rewarding.config.model_config.hf_text_config.pad_token_id = pad
    library = RewardModel(scalar[0], place=thread)
    for made in (endings(), responses(8)):
        reward, at_once = VllmReward(rewarding), VllmReward(rewarding)
        values = await stream(reward, made, seed=3)
        streamed = [values[each.prompt.rollout] for each in made]
        for scorer in (at_once, library):
            await scorer.extend([event for each in made for event in (each.prompt, each.chunk())])
        assert_close(streamed, await at_once.finish(finishes(made)))
        assert_close(streamed, await library.finish(finishes(made)))


def of_transformers(model: LlamaForCausalLM, sampling: Sampling, thread: Thread, top_k: int) -> Any:
    if top_k:
        return TeacherLogprobs(model, sampling=sampling, place=thread, top_k=top_k)
    return ReferenceLogprobs(model, sampling=sampling, place=thread)


async def assert_streams_like(scorer: Any, library: Any) -> None:
    made = responses(8)
    values = await stream(scorer, made, seed=3)
    await library.extend([event for each in made for event in (each.prompt, each.chunk())])
    for each, want in zip(made, await library.finish(finishes(made)), strict=True):
        assert_close(values[each.prompt.rollout], want)


@pytest.mark.parametrize("top_k", [0, 5], ids=["reference", "teacher"])
@pytest.mark.parametrize("sampled", [(1.0, 0), (0.7, SAMPLED), (0.0, 0)])
async def test_streamed_log_probs_are_those_of_transformers(
    sampled: tuple[float, int],
    top_k: int,
    causal: tuple[LlamaForCausalLM, Path],
    reading: VllmEngine,
    thread: Thread,
) -> None:
    sampling = Sampling(max_new_tokens=128, temperature=sampled[0], vocabulary=sampled[1])
    await reading.call_workers("oppo_temper", 1.0, VOCABULARY)
    scorer = VllmLogprobs(reading, sampling=sampling, top_k=top_k)
    await assert_streams_like(scorer, of_transformers(causal[0], sampling, thread, top_k))


async def test_the_cache_spares_what_was_read_before_but_a_token_of_each_block_for_log_probs(
    rewarding: VllmEngine, reading: VllmEngine
) -> None:
    tokens = np.random.default_rng(5).integers(3, SAMPLED, 320).tolist()
    made = answered(0, tokens[:20], tokens[20:])
    reference = VllmLogprobs(reading, sampling=Sampling(max_new_tokens=400))
    scorers: list[tuple[VllmScorer[Any, Any], int]] = [
        (VllmReward(rewarding), 0),
        (reference, len(tokens[1:]) // BLOCK),
    ]
    for scorer, again in scorers:
        await scorer.extend([made.prompt])
        for start in range(0, 300, 16):
            await scorer.extend([made.chunk(start, start + 16)])
        await scorer.finish(finishes([made]))
        assert (scorer.tokens.computed, scorer.tokens.again) == (320 + again, again)


async def test_a_server_gives_the_scores_of_transformers(
    scalar: tuple[PreTrainedModel, Path], tmp_path: Path, thread: Thread
) -> None:
    scalar[0].config.pad_token_id = PADDING
    with scoring_server(scalar[1], tmp_path, "--runner", "pooling", "--convert", "classify") as url:
        async with VllmReward(RewardServer(url, scalar[1])) as reward:
            await assert_streams_like(reward, RewardModel(scalar[0], place=thread))


async def test_a_server_gives_the_log_probs_of_transformers(
    causal: tuple[LlamaForCausalLM, Path], tmp_path: Path, thread: Thread
) -> None:
    model, directory = causal

    @torch.no_grad()
    def after_two() -> torch.Tensor:
        return torch.softmax(model(torch.zeros(1, 2, dtype=torch.long)).logits[0, -1], -1)

    probabilities = await anyio.to_thread.run_sync(after_two)
    padding = float(probabilities[SAMPLED:].max()) * (VOCABULARY - SAMPLED)
    sampling = Sampling(max_new_tokens=128)
    with scoring_server(directory, tmp_path, "--no-enable-chunked-prefill") as url:
        with pytest.raises(ConfigError, match="cannot leave the others out") as refused:
            LogprobServer(url, directory, vocabulary=SAMPLED)
        assert float(str(refused.value).rpartition(" ")[2]) == pytest.approx(min(1.0, padding), rel=0.1)
        for top_k in (0, 5):
            async with VllmLogprobs(
                LogprobServer(url, directory, top_k=top_k), sampling=sampling, top_k=top_k
            ) as scorer:
                await assert_streams_like(scorer, of_transformers(model, sampling, thread, top_k))
