"""Weights that an engine's model does not have are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from oppo.errors import ModelError
from oppo.vllm.sync import ServedWeights


def config(**changes: Any) -> LlamaConfig:
    made = LlamaConfig(vocab_size=32, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def weights(**changes: Any) -> dict[str, Tensor]:
    return LlamaForCausalLM(config(**changes)).state_dict()


@pytest.mark.parametrize("tied", [False, True])
def test_a_models_own_weights_pass_whether_tied_ones_come_once_or_twice(tied: bool) -> None:
    served = ServedWeights.of("actor", config(tie_word_embeddings=tied))
    model = LlamaForCausalLM(config(tie_word_embeddings=tied))
    served.require(model.state_dict())
    served.require(dict(model.named_parameters()))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"num_hidden_layers": 1}, r"actor, which vLLM serves: 9 missing \(model\.layers\.1\..*\.\.\.\); it goes on"),
        ({"num_hidden_layers": 3}, r"actor, which vLLM serves: 9 unknown \(model\.layers\.2\..*\.\.\.\)"),
        ({"vocab_size": 33}, r"2 of another shape \(model\.embed_tokens\.weight \[33, 8\], not \[32, 8\], lm_head"),
        ({"attention_bias": True}, r"8 unknown \(model\.layers\.0\.self_attn\.q_proj\.bias"),
    ],
)
def test_those_of_another_model_are_named(changes: dict[str, object], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        ServedWeights.of("actor", config()).require(weights(**changes))


def test_an_output_layer_of_its_own_is_missed_where_it_is_not_tied() -> None:
    without = {name: tensor for name, tensor in weights().items() if name != "lm_head.weight"}
    with pytest.raises(ModelError, match=r"1 missing \(lm_head\.weight\)"):
        ServedWeights.of("actor", config()).require(without)
    ServedWeights.of("actor", config(tie_word_embeddings=True)).require(without)


def test_it_takes_no_memory() -> None:
    large = ServedWeights.of("actor", config(vocab_size=10_000_000, hidden_size=10_000, intermediate_size=10_000))
    assert large.shapes["lm_head.weight"] == (10_000_000, 10_000)
    assert torch.empty(0).device.type == "cpu"
