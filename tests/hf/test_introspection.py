"""What a model is, where its type does not name it."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from oppo.hf.introspection import has_experts
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
