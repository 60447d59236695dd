"""What a model is, where its type does not name it."""

from __future__ import annotations

from dataclasses import astuple

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from oppo.hf.introspection import has_experts, passes_at
from oppo.hf.lora import add_lora
from tests.hf import tiny

_DBRX = {
    "d_model": 32,
    "n_heads": 2,
    "n_layers": 1,
    "vocab_size": 96,
    "attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0},
}


def test_a_model_with_more_than_one_expert_is_a_mixture() -> None:
    assert all(has_experts(tiny.mixture(name)) for name in tiny.MIXTURES)
    assert not any(has_experts(tiny.causal(name)) for name in tiny.PLAIN)


def test_the_experts_of_dbrx_are_in_a_section_of_its_config() -> None:
    for experts in (4, 1):
        sizes = {"ffn_hidden_size": 32, "hidden_size": 32, "moe_num_experts": experts, "moe_top_k": 1}
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.for_model("dbrx", **_DBRX, ffn_config=sizes))
        assert has_experts(model) == (experts > 1)


TOKENS = 48


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "neox", "olmo2"])
def test_flops_are_those_that_torch_counts(name: str) -> None:
    model = tiny.causal(name)
    model.set_attn_implementation("eager")
    passes, ids = passes_at(1.0, model), torch.arange(TOKENS)[None] % tiny.VOCABULARY
    with FlopCounterMode(display=False) as forward:
        loss = model(ids, use_cache=False).logits.float().logsumexp(-1).sum()
    # Eager attention computes with the tokens behind, too.
    assert forward.get_total_flops() == pytest.approx(passes.token * TOKENS + passes.pair * TOKENS**2, rel=0.02)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    both = passes_at(1.0, model, epochs=1)
    counted = forward.get_total_flops() + backward.get_total_flops()
    assert counted == pytest.approx(both.token * TOKENS + both.pair * TOKENS**2, rel=0.02)
    assert astuple(passes_at(1.0, model, epochs=3)) == pytest.approx(tuple(3 * each for each in astuple(both)))


def test_a_matrix_that_is_not_trained_has_no_gradient_of_its_own() -> None:
    model = tiny.causal("llama")
    alone = passes_at(1.0, model).token
    add_lora(model, 4, 8)
    adapters = passes_at(1.0, model).token - alone
    assert 0 < adapters < alone / 2
    assert passes_at(1.0, model, epochs=1).token == 2 * alone + 3 * adapters


def test_a_token_has_some_of_the_experts_and_attention_in_a_window_does_not_count() -> None:
    few, many = (tiny.mixture("qwen3-moe", num_experts_per_tok=count) for count in (1, 2))
    assert 0 < passes_at(1.0, many).token - passes_at(1.0, few).token < passes_at(1.0, few).token
    assert passes_at(1.0, tiny.causal("mistral")).pair == 0 < passes_at(1.0, tiny.causal("llama")).pair
