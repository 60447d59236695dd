from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BloomConfig,
    BloomForCausalLM,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from oppo.errors import ModelRefused
from oppo.hf.anatomy import backbone
from oppo.hf.probe import probe
from oppo.hf.slabs import Site, Slab
from tests.hf import tiny

torch.set_num_threads(1)

GPT2_TOKENS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 96, "hidden_size": 32}


def of(
    model: Callable[..., PreTrainedModel], config: Callable[..., PreTrainedConfig], **settings: object
) -> PreTrainedModel:
    return model(config(**settings))


@pytest.mark.parametrize("name", tiny.CONFIGS)
def test_a_causal_model_that_agrees_with_itself_passes(name: str) -> None:
    probe(tiny.causal(name))


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_sequence_classifier_passes_by_its_backbone(name: str) -> None:
    probe(tiny.scalar(name))


def test_bfloat16_passes_with_its_wider_tolerance() -> None:
    probe(tiny.causal("llama", dtype=torch.bfloat16))


def test_a_model_shorter_than_the_probe_is_read_to_its_end() -> None:
    probe(of(GPT2LMHeadModel, GPT2Config, n_embd=32, n_layer=2, n_head=4, n_positions=30, **GPT2_TOKENS))


def bloom() -> PreTrainedModel:
    return of(BloomForCausalLM, BloomConfig, n_layer=2, n_head=4, **SIZES)


def alibi_falcon() -> PreTrainedModel:
    return of(
        FalconForCausalLM,
        FalconConfig,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
        bos_token_id=1,
        eos_token_id=2,
        **SIZES,
    )


def t5() -> PreTrainedModel:
    return of(
        T5ForConditionalGeneration, T5Config, vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=2, num_heads=4
    )


def mamba() -> PreTrainedModel:
    return of(MambaForCausalLM, MambaConfig, num_hidden_layers=2, **SIZES)


def bert() -> PreTrainedModel:
    return of(
        BertForSequenceClassification,
        BertConfig,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        **SIZES,
    )


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (bloom, "BloomForCausalLM .*'bloom'.* ALiBi"),
        (alibi_falcon, "FalconForCausalLM .* ALiBi"),
        (t5, "T5ForConditionalGeneration .* encoder-decoder"),
        (mamba, "MambaForCausalLM .* recurrent"),
        (bert, "BertModel .* not causal"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name(make: Callable[[], PreTrainedModel], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        probe(make())


def test_chunked_attention_is_refused() -> None:
    model = tiny.causal("qwen3")
    model.config.layer_types = ["chunked_attention", "full_attention"]
    with pytest.raises(ModelRefused, match="'chunked_attention'"):
        probe(model)


def test_a_model_that_ignores_positions_is_refused_with_the_difference() -> None:
    model = tiny.causal("llama")

    def forget(part: torch.nn.Module, args: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
        return args, {**kwargs, "position_ids": None}

    backbone(model).register_forward_pre_hook(forget, with_kwargs=True)
    with pytest.raises(ModelRefused, match=r"position \d+ of \d+ differs .* by \d\.\de[+-]\d\d of the largest output"):
        probe(model)


def test_a_cache_that_loses_a_token_in_a_move_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = Slab.adopt
    monkeypatch.setattr(Slab, "adopt", lambda slab, row, source, length: adopt(slab, row, source, length - 1))
    with pytest.raises(ModelRefused, match="read in pieces"):
        probe(tiny.causal("llama"))


def test_a_cache_that_returns_another_rows_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Slab.store

    def swapped(slab: Slab, layer: int, keys: Tensor, values: Tensor, site: Site) -> tuple[Tensor, Tensor]:
        ours, theirs = store(slab, layer, keys, values, site)
        return ours.flip(0), theirs

    monkeypatch.setattr(Slab, "store", swapped)
    with pytest.raises(ModelRefused, match="read in pieces"):
        probe(tiny.causal("llama"))


@pytest.mark.parametrize("name", tiny.WINDOWED)
def test_a_window_that_is_not_respected_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from oppo.hf import masks

    monkeypatch.setattr(masks, "window_of", lambda config: None)
    with pytest.raises(ModelRefused, match="read in pieces"):
        probe(tiny.causal(name))


def test_a_model_that_fails_is_refused_with_its_error() -> None:
    model = tiny.causal("llama")

    class Broken(torch.nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            raise RuntimeError("kernel missing")

    backbone(model).norm = Broken()
    with pytest.raises(ModelRefused, match="kernel missing"):
        probe(model)
