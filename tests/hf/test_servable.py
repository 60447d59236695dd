from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from types import ModuleType, SimpleNamespace
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertForSequenceClassification,
    FalconConfig,
    FalconForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    Llama4TextConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.integrations import hub_kernels

from oppo.errors import ModelRefused
from oppo.hf.kv.attention import AttentionKind, Masks, Segments, attend_in_segments
from oppo.hf.kv.cache import KVRegion, Slab
from oppo.hf.model_parts import backbone, cache_argument
from oppo.hf.servable import probe
from tests.hf import tiny

GPT2_TOKENS = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}
SIZES = {"vocab_size": 96, "hidden_size": 32}


def of(
    model: Callable[..., PreTrainedModel], config: Callable[..., PreTrainedConfig], **settings: object
) -> PreTrainedModel:
    return model(config(**settings))


def by_name(cache: object) -> None: ...


def by_the_name_of_before(past_key_values: object) -> None: ...


def by_both(past_key_values: object, cache: object) -> None: ...


def without(input_ids: object) -> None: ...


@pytest.mark.parametrize(
    ("forward", "name"),
    [(by_name, "cache"), (by_the_name_of_before, "past_key_values"), (by_both, "cache"), (without, None)],
)
def test_a_cache_is_passed_by_either_name_that_transformers_has_for_it(
    forward: Callable[..., None], name: str | None
) -> None:
    model = tiny.causal()
    model.forward = forward
    assert cache_argument(model) == name


def serves(model: PreTrainedModel, kind: AttentionKind) -> bool:
    try:
        return probe(model, attention=kind) == kind
    except ModelRefused:
        return False


SOME = ("deepseek-v3", "diffllama")
OTHERS = [pytest.param(name, marks=pytest.mark.deep) for name in tiny.WHOLE if name not in SOME]


@pytest.mark.parametrize("name", [*SOME, *OTHERS])
def test_a_model_that_reads_keys_or_values_before_attention_is_served_by_the_fastest_kind_that_agrees(
    name: str,
) -> None:
    config = tiny.WHOLE[name]()
    kinds: list[AttentionKind] = [kind for kind in ("segmented", "padded") if serves(tiny.of(config), kind)]
    assert kinds == (["padded"] if name in {"diffllama", "jetmoe", "doge"} else ["segmented", "padded"])
    model = tiny.of(config)
    assert probe(model) == kinds[0]
    assert attend_in_segments(model) == (kinds[0] == "segmented"), "the choice holds when it is served"
    assert probe(AutoModelForCausalLM.from_config(config, attn_implementation="eager")) == "eager"


def test_a_model_that_cannot_attend_in_segments_is_refused_if_it_has_to() -> None:
    with pytest.raises(ModelRefused, match=r"DiffLlama.* with attention 'segmented': "):
        probe(tiny.of(tiny.WHOLE["diffllama"]()), attention="segmented")


def test_a_kind_of_attention_that_a_model_was_not_loaded_for_is_refused() -> None:
    with pytest.raises(
        ModelRefused, match="with attention 'eager': it was loaded with 'sdpa', so expected 'segmented', 'pad"
    ):
        probe(tiny.causal("llama"), attention="eager")
    with pytest.raises(
        ModelRefused, match=r"XGLM.* 'padded': it was loaded with 'eager', so expected 'eager' or 'auto'"
    ):
        probe(tiny.own_attention(), attention="padded")


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_a_sequence_classifier_passes_by_its_backbone(name: str) -> None:
    probe(tiny.scalar(name))


def test_bfloat16_passes_with_its_wider_tolerance() -> None:
    probe(tiny.causal("llama", dtype=torch.bfloat16))


def test_a_model_shorter_than_the_probe_is_read_to_its_end() -> None:
    probe(of(GPT2LMHeadModel, GPT2Config, n_embd=32, n_layer=2, n_head=4, n_positions=30, **GPT2_TOKENS))


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


def capacity() -> PreTrainedModel:
    """Return a model whose layers see how many tokens of a batch there are, as experts of bounded capacity do."""
    model = tiny.causal("llama")

    def crowded(module: torch.nn.Module, inputs: object, hidden: Tensor) -> Tensor:
        return hidden * (1 + hidden.shape[:-1].numel() / 1000)

    for layer in model.get_decoder().layers:
        layer.mlp.register_forward_hook(crowded)
    return model


def bert() -> PreTrainedModel:
    return of(
        BertForSequenceClassification,
        BertConfig,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=32,
        **SIZES,
    )


def llama4() -> PreTrainedModel:
    return tiny.of(
        tiny.build(
            Llama4TextConfig,
            tiny.GROUPED,
            head_dim=8,
            attention_chunk_size=24,
            intermediate_size_mlp=48,
            num_local_experts=2,
        )
    )


@pytest.mark.parametrize(
    ("name", "reason"),
    {
        "mpt": "MptForCausalLM .* ALiBi",
        "gpt-neo": "GPTNeoForCausalLM .*'gpt_neo'.* local layers",
        "minimax": "MiniMaxForCausalLM .* cache of its own|minimax.* from transformers 5.19 on",
        "bloom": "BloomForCausalLM .*'bloom'.* ALiBi",
        "mamba": "MambaForCausalLM .* begin each chunk of a sequence anew",
        "jamba": "JambaForCausalLM .* begin each chunk of a sequence anew",
        "rwkv": "RwkvForCausalLM .* takes no KV cache",
    }.items(),
)
def test_a_model_that_cannot_continue_a_sequence_reads_whole_ones(name: str, reason: str) -> None:
    assert re.search(reason, tiny.why_whole(tiny.of(tiny.ONLY_WHOLE[name]())))


def test_alibi_is_known_by_its_setting_too() -> None:
    assert re.search("FalconForCausalLM .* ALiBi", tiny.why_whole(alibi_falcon()))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (t5, "T5ForConditionalGeneration .* encoder-decoder"),
        (bert, "BertModel .* not causal"),
        (capacity, r"LlamaForCausalLM .* nor can it read whole sequences: read beside longer rows, .* differs"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_by_name(make: Callable[[], PreTrainedModel], reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        probe(make())


def test_attention_in_chunks_passes() -> None:
    probe(llama4())


def test_attention_sinks_and_a_router_pass_together() -> None:
    gpt_oss = tiny.build(GptOssConfig, tiny.GROUPED, head_dim=8, sliding_window=tiny.WINDOW, num_local_experts=4)
    probe(tiny.of(gpt_oss))


@pytest.mark.parametrize("make", [lambda: tiny.causal("gemma2"), tiny.own_attention], ids=["gemma2", "xglm"])
def test_a_boolean_mask_under_eager_attention_is_found(
    make: Callable[[], PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Masks, "_encoded", lambda masks, allowed: allowed)
    assert "read in pieces" in tiny.why_whole(make())


def mixture(dtype: torch.dtype) -> PreTrainedModel:
    """Return a deep mixture of experts: in two-byte numbers rounding decides some of its routes."""
    settings = {"num_hidden_layers": 8, "num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 32}
    return tiny.of(tiny.build(Qwen3MoeConfig, tiny.GROUPED, settings, hidden_size=64), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixture_passes_though_rounding_decides_some_of_its_routes(dtype: torch.dtype) -> None:
    probe(mixture(dtype))


@pytest.mark.parametrize("fault", ["move", "mask", "position"])
def test_a_fault_is_found_in_a_mixture_though_only_its_median_counts(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = mixture(torch.bfloat16)
    if fault == "move":
        lose_a_token_in_moves(monkeypatch)
    elif fault == "mask":
        monkeypatch.setattr(Masks, "_encoded", lambda masks, allowed: allowed | allowed.roll(1, -1))
    else:
        backbone(model).register_forward_pre_hook(lambda _, args, kwargs: (args, _shifted(kwargs)), with_kwargs=True)
        with pytest.raises(ModelRefused, match=r"read in pieces, .* nor can it read whole .* read beside longer rows"):
            probe(model)
        return
    assert "read in pieces" in tiny.why_whole(model)


def lose_a_token_in_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    adopt = Slab.adopt

    def forgetful(slab: Slab, rows: Mapping[int, int], source: Slab) -> None:
        adopt(slab, rows, source)
        for keys, values in slab._layers.values():
            for row, length in rows.items():
                keys[slab.slot(row), :, length - 1], values[slab.slot(row), :, length - 1] = 0, 0

    monkeypatch.setattr(Slab, "adopt", forgetful)


def _shifted(kwargs: dict[str, object]) -> dict[str, object]:
    """Return the inputs with every position but the first one too small."""
    positions = kwargs.get("position_ids")
    return {**kwargs, "position_ids": (positions - 1).clamp(min=0)} if isinstance(positions, Tensor) else kwargs


def test_a_model_that_ignores_positions_is_not_read_in_pieces_because_of_the_difference() -> None:
    model = tiny.causal("llama")

    def forget(part: torch.nn.Module, args: object, kwargs: dict[str, object]) -> tuple[object, dict[str, object]]:
        return args, {**kwargs, "position_ids": None}

    backbone(model).register_forward_pre_hook(forget, with_kwargs=True)
    assert re.search(r"position \d+ of \d+ differs .* by \d\.\de[+-]\d\d of the largest output", tiny.why_whole(model))


def test_a_cache_that_loses_a_token_in_a_move_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    lose_a_token_in_moves(monkeypatch)
    assert "read in pieces" in tiny.why_whole(tiny.causal("llama"))


def test_a_cache_that_returns_another_rows_keys_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Slab.store

    def swapped(slab: Slab, layer: int, region: KVRegion, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        ours, theirs = store(slab, layer, region, keys, values)
        return ours.flip(0), theirs

    monkeypatch.setattr(Slab, "store", swapped)
    assert "read in pieces" in tiny.why_whole(tiny.causal("llama"))


@pytest.mark.parametrize("count", [2, 3])
def test_a_fault_of_segmented_attention_is_found_though_short_rows_would_be_one_rectangle(
    count: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Three rows are stepped in a segment each; at most two length classes are read together."""
    monkeypatch.setattr("oppo.hf.kv.attention.SEGMENT_BYTES", 256 * 1024)  # as it is outside of these tests
    made = list[int]()

    def faulty(tensors: tuple[Tensor, ...]) -> Segments:
        made.append(len(tensors))
        return Segments(tuple(map(torch.zeros_like, tensors)) if len(tensors) == count else tensors)

    monkeypatch.setattr("oppo.hf.kv.cache.Segments", faulty)
    with pytest.raises(ModelRefused, match="read in pieces"):
        probe(tiny.causal("llama"), attention="segmented")
    assert set(made) == {2, 3}
    assert probe(tiny.causal("llama")) == "padded", "what does not serve is not taken"
    assert probe(tiny.own_attention()) == "eager"


@pytest.mark.parametrize("name", ["qwen2-sliding", "mistral", "gemma2"])
def test_a_window_that_is_not_respected_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oppo.hf.kv.attention.window_of", lambda config: None)
    assert "read in pieces" in tiny.why_whole(tiny.causal(name))


def test_a_model_that_fails_is_refused_with_its_error() -> None:
    model = tiny.causal("llama")

    class Broken(torch.nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            raise RuntimeError("kernel missing")

    backbone(model).norm = Broken()
    with pytest.raises(ModelRefused, match="kernel missing"):
        probe(model)


@pytest.mark.skipif(
    not hasattr(hub_kernels, "use_kernel_func_from_hub_with_fallback"),
    reason="transformers chooses kernels so, and models with states are served, from 5.19 on",
)
@pytest.mark.parametrize(
    ("wrong_by", "said"),
    [
        (1e-7, r"differ from torch's by \d\.\de-0\d of the largest output$"),
        (0.1, "at most 1e-04"),
        (None, r"fail; .*torch's"),
    ],
)
def test_a_fast_kernel_that_differs_from_torchs_is_not_used(
    wrong_by: float | None, said: str, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    model = tiny.of(tiny.STATEFUL["qwen3.5"]())
    module = sys.modules[type(model).__module__]
    of_torch: Callable[..., Sequence[Tensor]] = module.torch_chunk_gated_delta_rule.__wrapped__

    @wraps(of_torch)
    def fast(*inputs: Tensor, **options: object) -> Sequence[Tensor]:
        if wrong_by is None:
            raise RuntimeError("a pointer to the memory of a GPU was expected")
        outputs, state = of_torch(*inputs, **options)
        return outputs * (1 + wrong_by), state

    package = SimpleNamespace(chunk_gated_delta_rule=fast)
    monkeypatch.setitem(sys.modules, "installed_kernels", cast("ModuleType", package))
    made = hub_kernels.use_kernel_func_from_hub_with_fallback("chunk_gated_delta_rule", "installed_kernels", "")(
        of_torch
    )
    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", made)
    assert probe(model) != "whole"
    assert (module.torch_chunk_gated_delta_rule is of_torch) == (wrong_by != 1e-7)
    assert any(re.search(said, message) for message in messages)
