"""The reward model on the real engine, beside the one on transformers; `make test-vllm` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import numpy as np
import pytest
import torch
from transformers import AutoModelForSequenceClassification, LlamaConfig, PreTrainedModel, Qwen2Config

from oppo.hf.serve.scorers import RewardModel
from oppo.placement import Thread
from oppo.testing import check_scorer
from oppo.vllm import VllmEngine, VllmReward
from oppo.vllm.scorers import SCALAR, RewardServer
from tests.kit.responses import EOS, PADDING, VOCABULARY, answered, endings, finishes, responses, stream
from tests.kit.workplace import tokenizer
from tests.vllm import scenario
from tests.vllm.real.conftest import scoring_server

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="module")]

TOLERANCE = 1e-4
BLOCK = 32


def saved(directory: Path, kind: type[LlamaConfig | Qwen2Config] = Qwen2Config) -> PreTrainedModel:
    """Return a tiny reward model that vLLM's kernels take, saved in a directory with a tokenizer."""
    config = kind(
        vocab_size=VOCABULARY,
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
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path]:
    """Return a tiny reward model, and the directory it is saved in."""
    directory = tmp_path_factory.mktemp("reward")
    return saved(directory), directory


@pytest.fixture(scope="module")
def engine(model: tuple[PreTrainedModel, Path]) -> Iterator[VllmEngine]:
    with VllmEngine.start(model[1], arguments={**SCALAR, "dtype": "float32", "block_size": BLOCK}) as engine:
        yield engine


async def test_the_contract_is_kept(engine: VllmEngine) -> None:
    async def make() -> VllmReward:
        return VllmReward(engine)

    made = [each for each in responses(8) if len(each) >= 4]
    await check_scorer(make, finishes(made), lambda a, b: abs(a - b) <= TOLERANCE)


async def test_it_does_what_the_fake_does(engine: VllmEngine) -> None:
    await scenario.pooling(engine, BLOCK, partial(anyio.sleep, 0.1))


def assert_close(got: object, want: object) -> None:
    np.testing.assert_allclose(np.asarray(got), np.asarray(want), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("pad", [PADDING, EOS, None], ids=["padding", "eos", "none"])
async def test_a_streamed_score_is_that_of_one_request_and_of_transformers(
    pad: int | None, model: tuple[PreTrainedModel, Path], engine: VllmEngine, thread: Thread
) -> None:
    model[0].config.pad_token_id = engine.config.model_config.hf_text_config.pad_token_id = pad
    library = RewardModel(model[0], place=thread)
    for made in (endings(), responses(8)):
        reward, at_once = VllmReward(engine), VllmReward(engine)
        values = await stream(reward, made, seed=3)
        streamed = [values[each.prompt.rollout] for each in made]
        for scorer in (at_once, library):
            await scorer.extend([event for each in made for event in (each.prompt, each.chunk())])
        assert_close(streamed, await at_once.finish(finishes(made)))
        assert_close(streamed, await library.finish(finishes(made)))


async def test_the_cache_spares_what_was_read_before(engine: VllmEngine) -> None:
    reward = VllmReward(engine)
    tokens = np.random.default_rng(5).integers(3, VOCABULARY, 320).tolist()
    made = answered(0, tokens[:20], tokens[20:])
    await reward.extend([made.prompt])
    for start in range(0, 300, 16):
        await reward.extend([made.chunk(start, start + 16)])
    await reward.finish(finishes([made]))
    assert (reward.tokens.computed, reward.tokens.again) == (320, 0)


@pytest.fixture(scope="module")
def url(model: tuple[PreTrainedModel, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with scoring_server(
        model[1], tmp_path_factory.mktemp("server"), "--runner", "pooling", "--convert", "classify"
    ) as url:
        yield url


async def test_a_server_gives_the_scores_of_transformers(
    model: tuple[PreTrainedModel, Path], url: str, thread: Thread
) -> None:
    model[0].config.pad_token_id = PADDING
    made, library = responses(8), RewardModel(model[0], place=thread)
    await library.extend([event for each in made for event in (each.prompt, each.chunk())])
    async with VllmReward(RewardServer(url, model[1])) as reward:
        values = await stream(reward, made, seed=3)
    assert_close([values[each.prompt.rollout] for each in made], await library.finish(finishes(made)))
