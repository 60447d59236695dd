"""Tiny real transformers models, made on the spot: two layers, random weights, a few thousand parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    CohereConfig,
    DeepseekV2Config,
    DeepseekV3Config,
    DiffLlamaConfig,
    DogeConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    Glm4MoeLiteConfig,
    GPT2Config,
    GPTJConfig,
    GPTNeoXConfig,
    GraniteConfig,
    JetMoeConfig,
    LlamaConfig,
    LongcatFlashConfig,
    MistralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SmolLM3Config,
    StableLmConfig,
    Starcoder2Config,
    XGLMConfig,
    YoutuConfig,
)

from oppo.hf.model_files import SCALAR
from oppo.hf.model_parts import only_whole
from oppo.hf.servable import probe
from oppo.log import with_route
from tests.kit.known import known

P = ParamSpec("P")
R = TypeVar("R")

VOCABULARY = 96
HIDDEN = 32
LONGEST = 512
WINDOW = 24

_TOKENS = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Ten times the usual: attention of a random model is then peaked enough for a wrong mask to show.
    "initializer_range": 0.2,
}
_BODY = {
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
    **_TOKENS,
}
GROUPED: Mapping[str, object] = {"num_key_value_heads": 2, **_BODY}
_HEAD_DIM = {"head_dim": 8, **GROUPED}
_GPT2 = {"n_embd": HIDDEN, "n_layer": 2, "n_head": 4, "n_positions": LONGEST, **_TOKENS}
_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_MIXED = ["sliding_attention", "full_attention"]
_OPT = {
    **{name: value for name, value in _BODY.items() if name not in ("intermediate_size", "initializer_range")},
    "ffn_dim": 48,
    "word_embed_proj_dim": 16,
    "init_std": 0.2,
}
_XGLM = {
    "d_model": HIDDEN,
    "ffn_dim": 48,
    "num_layers": 2,
    "attention_heads": 4,
    "max_position_embeddings": LONGEST,
    "init_std": 0.2,
    **{name: value for name, value in _TOKENS.items() if name != "initializer_range"},
}


def _without(sizes: Mapping[str, object], name: str) -> Mapping[str, object]:
    return {key: value for key, value in sizes.items() if key != name}


def build(kind: Callable[..., PreTrainedConfig], *shared: Mapping[str, object], **settings: object) -> PreTrainedConfig:
    """Return a config; each architecture has its own names for the same sizes."""
    return kind(**{name: value for group in (*shared, settings) for name, value in group.items()})


CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: build(LlamaConfig, _HEAD_DIM),
    "qwen2": lambda: build(Qwen2Config, GROUPED),
    "qwen2-sliding": lambda: build(
        Qwen2Config, GROUPED, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=1
    ),
    "qwen2-moe": lambda: build(Qwen2MoeConfig, GROUPED, _EXPERTS, shared_expert_intermediate_size=16),
    "qwen3": lambda: build(Qwen3Config, _HEAD_DIM),
    "qwen3-moe": lambda: build(Qwen3MoeConfig, _HEAD_DIM, _EXPERTS),
    "mistral": lambda: build(MistralConfig, _HEAD_DIM, sliding_window=WINDOW),
    "gemma": lambda: build(GemmaConfig, _HEAD_DIM),
    "gemma2": lambda: build(Gemma2Config, _HEAD_DIM, sliding_window=WINDOW, attn_implementation="eager"),
    "gemma3": lambda: build(Gemma3TextConfig, _HEAD_DIM, sliding_window=WINDOW, layer_types=_MIXED),
    "phi": lambda: build(PhiConfig, GROUPED, partial_rotary_factor=0.5),
    "phi3": lambda: build(Phi3Config, GROUPED, sliding_window=WINDOW),
    "gpt2": lambda: build(GPT2Config, _GPT2),
    "neox": lambda: build(GPTNeoXConfig, _BODY),
    "gptj": lambda: build(GPTJConfig, _GPT2, rotary_dim=4),
    "opt": lambda: build(OPTConfig, _OPT),
    "falcon": lambda: build(FalconConfig, _BODY, alibi=False),
    "starcoder2": lambda: build(Starcoder2Config, GROUPED, sliding_window=WINDOW),
    "stablelm": lambda: build(StableLmConfig, GROUPED, partial_rotary_factor=0.5, use_parallel_residual=True),
    "olmo2": lambda: build(Olmo2Config, GROUPED),
    "cohere": lambda: build(CohereConfig, GROUPED, logit_scale=0.25, use_qk_norm=True),
    "granite": lambda: build(GraniteConfig, GROUPED, residual_multiplier=0.5, logits_scaling=2.0),
    "smollm3": lambda: build(SmolLM3Config, GROUPED, no_rope_layers=[1, 0]),
}
"""The architectures that are served, by a short name."""

_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    **_BODY,
    "num_key_value_heads": 4,
}
_DEEPSEEK = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LONGCAT = {
    "ffn_hidden_size": 48,
    "expert_ffn_hidden_size": 16,
    "num_layers": 1,
    "moe_topk": 2,
    "zero_expert_num": 2,
    "head_dim": 8,
}

WHOLE: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "deepseek-v2": lambda: build(DeepseekV2Config, _LATENT, _DEEPSEEK),
    "deepseek-v3": lambda: build(DeepseekV3Config, _LATENT, _DEEPSEEK),
    "glm4-moe-lite": lambda: build(Glm4MoeLiteConfig, _LATENT, _DEEPSEEK),
    "youtu": lambda: build(YoutuConfig, _LATENT),
    "longcat": lambda: build(LongcatFlashConfig, _without(_LATENT, "num_hidden_layers"), _DEEPSEEK, _LONGCAT),
    # By their names: the lowest transformers that is served has neither.
    "axk1": lambda: build(partial(AutoConfig.for_model, "axk1"), _LATENT, _DEEPSEEK),
    "minicpm3": lambda: build(partial(AutoConfig.for_model, "minicpm3"), _LATENT),
    "diffllama": lambda: build(DiffLlamaConfig, GROUPED),
    "jetmoe": lambda: build(JetMoeConfig, GROUPED, kv_channels=8, num_local_experts=4, num_experts_per_tok=2),
    "doge": lambda: build(DogeConfig, GROUPED),
}
"""Models that read keys or values between cache and attention: only latents are then expanded segment by segment."""

_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_MAMBA = {
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_expand": 2,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 8,
}
_NEMOTRON = {
    "layers_block_type": ["mamba", "attention", "mlp"],
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "ssm_state_size": 8,
    "chunk_size": 8,
    "time_step_min": 0.7,
}
_ZAMBA = {
    "mamba_d_state": 8,
    "mamba_ngroups": 1,
    "n_mamba_heads": 8,
    "mamba_headdim": 8,
    "chunk_size": 8,
    "layers_block_type": ["mamba", "hybrid"],
    "num_key_value_heads": 4,
    "adapter_rank": 4,
}
_KIMI = {
    **_without(_LATENT, "q_lora_rank"),
    "layer_types": ["linear_attention", "full_attention"],
    "mlp_layer_types": ["dense", "dense"],
    "linear_num_heads": 4,
    "linear_head_dim": 8,
}
_GRANITE_HYBRID = {
    "layer_types": ["mamba", "attention"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 16,
}


def _named(name: str) -> Callable[..., PreTrainedConfig]:
    return partial(AutoConfig.for_model, name)


STATEFUL: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-next": lambda: build(_named("qwen3_next"), _HEAD_DIM, _EXPERTS, _LINEAR, shared_expert_intermediate_size=16),
    "qwen3.5": lambda: build(_named("qwen3_5_text"), _HEAD_DIM, _LINEAR),
    "olmo-hybrid": lambda: build(_named("olmo_hybrid"), GROUPED, _LINEAR),
    "falcon-h1": lambda: build(_named("falcon_h1"), _HEAD_DIM, _MAMBA, mamba_d_ssm=64),
    "bamba": lambda: build(_named("bamba"), GROUPED, _MAMBA, attn_layer_indices=[1]),
    "granite-hybrid": lambda: build(_named("granitemoehybrid"), GROUPED, _MAMBA, _GRANITE_HYBRID),
    "nemotron-h": lambda: build(_named("nemotron_h"), _without(_HEAD_DIM, "num_hidden_layers"), _NEMOTRON),
    "zamba2": lambda: build(_named("zamba2"), GROUPED, _ZAMBA),
    "lfm2": lambda: build(
        _named("lfm2"), GROUPED, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False
    ),
    "kimi-linear": lambda: build(_named("kimi_linear"), _KIMI),
}
"""Models with recurrent or convolution states beside the KV cache, by their names: not every transformers has them."""

# With few heads, or for a token whose embedding is zero as that of padding is, scores tie at 0, and the pick is any.
_INDEXER = {"index_n_heads": 32, "index_head_dim": 32, "index_topk": 12, "pad_token_id": None}

INDEXED: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "deepseek-v3.2": lambda: build(_named("deepseek_v32"), _LATENT, _DEEPSEEK, _INDEXER),
    "glm-dsa": lambda: build(_named("glm_moe_dsa"), _LATENT, _DEEPSEEK, _INDEXER),
}
"""Models whose tokens attend to the keys that an indexer picks, by their names: not every transformers has them."""

_NEO = {"num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]], "hidden_size": HIDDEN}
_JAMBA = {
    "mamba_d_state": 8,
    "mamba_dt_rank": 4,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
    "num_experts": 4,
}

ONLY_WHOLE: Mapping[str, Callable[[], PreTrainedConfig]] = {
    # The window is longer than the probe, which therefore could not see the fault.
    "gpt-neo": lambda: build(_named("gpt_neo"), _TOKENS, _NEO, window_size=256),
    "mpt": lambda: build(_named("mpt"), _TOKENS, d_model=HIDDEN, n_heads=4, n_layers=2, max_seq_len=LONGEST),
    "bloom": lambda: build(_named("bloom"), _TOKENS, hidden_size=HIDDEN, n_layer=2, n_head=4),
    "mamba": lambda: build(_named("mamba"), _TOKENS, hidden_size=HIDDEN, state_size=8, num_hidden_layers=2),
    "jamba": lambda: build(_named("jamba"), GROUPED, _JAMBA),
    "rwkv": lambda: build(
        _named("rwkv"), _TOKENS, hidden_size=HIDDEN, attention_hidden_size=HIDDEN, num_hidden_layers=8
    ),
    "minimax": lambda: build(
        _named("minimax"), _HEAD_DIM, num_local_experts=4, layer_types=["linear_attention", "full_attention"]
    ),
}
"""Models that cannot continue a sequence, and read whole ones."""

MIXTURES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "mixtral": lambda: build(_named("mixtral"), GROUPED, num_local_experts=6),
    "olmoe": lambda: build(_named("olmoe"), GROUPED, num_experts=6, num_experts_per_tok=2),
    "gpt-oss": lambda: build(_named("gpt_oss"), _HEAD_DIM, sliding_window=WINDOW, num_local_experts=6),
    "glm4-moe": lambda: build(_named("glm4_moe"), _HEAD_DIM, _DEEPSEEK),
    "ernie4.5-moe": lambda: build(_named("ernie4_5_moe"), GROUPED, moe_num_experts=6, moe_k=2, moe_layer_start_index=0),
    **{name: CONFIGS[name] for name in ("qwen2-moe", "qwen3-moe")},
    **{name: WHOLE[name] for name in ("deepseek-v3", "jetmoe")},
    **{name: STATEFUL[name] for name in ("qwen3-next", "granite-hybrid")},
}
"""Mixtures of experts that are trained."""


def _seeing(name: str, text: Mapping[str, object], vision: Mapping[str, object], **own: object) -> PreTrainedConfig:
    return AutoConfig.for_model(name, text_config=dict(text), vision_config=dict(vision), pad_token_id=0, **own)


_VISION = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
_PATCHES = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": HIDDEN,
    "patch_size": 8,
}
_SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}

VISION: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen3-vl": lambda: _seeing("qwen3_vl", {**_HEAD_DIM, **_SECTIONS}, {**_PATCHES, "deepstack_visual_indexes": [0]}),
    "gemma3": lambda: _seeing(
        "gemma3", {**_HEAD_DIM, "sliding_window": WINDOW, "layer_types": _MIXED}, _VISION, mm_tokens_per_image=4
    ),
    "qwen3.5": lambda: _seeing("qwen3_5", {**_HEAD_DIM, **_LINEAR}, _PATCHES),
    "git": lambda: build(_named("git"), GROUPED, vision_config=dict(_VISION)),
    "llava": lambda: _seeing(
        "llava", {"model_type": "llama", **_HEAD_DIM}, {"model_type": "clip_vision_model", **_VISION}
    ),
}
"""Models that read images too, by their names: not every transformers has them."""


def apart(work: Callable[P, R]) -> Callable[P, R]:
    """Return ``work``, done in a thread of its own: a forward pass belongs on no event loop's, in tests neither."""

    def done(*args: P.args, **kwargs: P.kwargs) -> R:
        with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return pool.submit(with_route(work), *args, **kwargs).result()

    return done


def of(config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = AutoModelForImageTextToText if hasattr(config, "vision_config") else AutoModelForCausalLM
        model: PreTrainedModel = kind.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call] # transformers'
    return model


def causal(name: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    return of(CONFIGS[name](), seed=seed, dtype=dtype)


def why_whole(model: PreTrainedModel) -> str:
    """Return the reason why the probe lets a model read whole sequences only."""
    assert probe(model) == "whole"
    return known(only_whole(model))


def mixture(name: str, *, seed: int = 0, **settings: object) -> PreTrainedModel:
    config = MIXTURES[name]()
    config.update(settings)
    return of(config, seed=seed)


def own_attention() -> PreTrainedModel:
    """Return a causal LM (XGLM) whose attention is code of its own, so that it attends eagerly only."""
    return of(build(XGLMConfig, _XGLM))


def scalar(name: str = "llama", *, seed: int = 0, labels: int = 1, pad: int | None = 0) -> PreTrainedModel:
    config = CONFIGS[name]()
    config.num_labels = labels
    config.pad_token_id = pad
    return scalar_of(config, seed=seed)


def scalar_of(config: PreTrainedConfig, *, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return SCALAR.made(config)


def lengthened(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same model with more ids in its table, which are the likeliest everywhere."""
    wide, known = copy.deepcopy(model), model.config.vocab_size
    wide.resize_token_embeddings(known + 28, mean_resizing=False)
    with torch.no_grad():
        wide.get_output_embeddings().weight[known:] = 30 * wide.get_output_embeddings().weight[:28]
    return wide


def steps(name: str = "llama", *, seed: int = 0, labels: int = 2) -> PreTrainedModel:
    config = CONFIGS[name]()
    config.num_labels = labels
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForTokenClassification.from_config(config)
    return model


def shaken(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model, its trained weights changed at random: adapters then change outputs."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    return model


def shapes_of(model: PreTrainedModel) -> list[tuple[int, ...]]:
    """Return what will hold the rows and columns of each forward pass but those of two short rows."""
    shapes: list[tuple[int, ...]] = []

    def note(_: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        if kwargs.get("use_cache"):
            shapes.append(tuple(kwargs["input_ids"].shape))

    model.register_forward_pre_hook(note, with_kwargs=True)
    return shapes
