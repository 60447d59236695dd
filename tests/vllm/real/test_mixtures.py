"""Mixtures of experts on the real engine: experts are one tensor in the trainer, and many in a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from oppo.errors import ModelLost
from oppo.models import Sampling, Weights
from oppo.vllm import VllmEngine, VllmPolicy
from tests.vllm.real import reference
from tests.vllm.real.conftest import VOCABULARY
from tests.vllm.real.test_policy import some, whole

pytestmark = [pytest.mark.vllm, pytest.mark.asyncio(loop_scope="session"), pytest.mark.timeout(300)]

EXPERTS = {
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 64, "norm_topk_prob": True},
    "mixtral": {"num_local_experts": 4},
    "gpt_oss": {"num_local_experts": 4},
}


def mixture(name: str, seed: int) -> PreTrainedModel:
    config = AutoConfig.for_model(
        name,
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        num_experts_per_tok=2,
        max_position_embeddings=512,
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        **EXPERTS[name],
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.train(mode=False)
    return model


async def synced(engine: VllmEngine, trained: PreTrainedModel) -> None:
    """Check that tokens after a weight sync are those of the trained model."""
    policy = VllmPolicy(engine, sampling=Sampling(max_new_tokens=16, stop=(2,), seed=1))
    await policy.load(Weights(1, trained.state_dict()))
    prompts = some(3)
    for prompt, pieces in zip(prompts, await whole(policy, prompts), strict=True):
        found = torch.cat([torch.from_numpy(piece.logprobs) for piece in pieces])
        wanted = torch.from_numpy(await reference.logprobs([trained, trained], prompt, pieces))
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
async def test_experts_are_synced(name: str, tmp_path: Path) -> None:
    mixture(name, seed=0).save_pretrained(tmp_path)
    with VllmEngine.start(tmp_path, arguments={"max_model_len": 128}, cores=1, log=tmp_path / "vllm.log") as engine:
        await synced(engine, mixture(name, seed=1))


async def test_an_engine_that_passes_over_weights_is_lost_and_names_the_layer(tmp_path: Path) -> None:
    """vLLM's loader of GPT-OSS writes past the reload of layers."""
    mixture("gpt_oss", seed=0).save_pretrained(tmp_path)
    with (
        VllmEngine.start(tmp_path, arguments={"max_model_len": 128}, cores=1, log=tmp_path / "vllm.log") as engine,
        pytest.raises(ModelLost, match=r"GptOssForCausalLM took no weights for \d+ layers, model\.layers\.0"),
    ):
        await synced(engine, mixture("gpt_oss", seed=1))
