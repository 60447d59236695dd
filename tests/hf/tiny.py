"""Tiny real transformers models, made on the spot: two layers, random weights, a few thousand parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

VOCABULARY = 96
HIDDEN = 32
LONGEST = 512
WINDOW = 24

_ROPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Ten times the usual: attention of a random model is then peaked enough for a wrong mask to show.
    "initializer_range": 0.2,
}


def build(kind: Callable[..., PreTrainedConfig], **settings: object) -> PreTrainedConfig:
    """Return a config; each architecture has its own names for the same sizes."""
    return kind(**settings)


_TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}


def _qwen2() -> PreTrainedConfig:
    rope = {name: value for name, value in _ROPE.items() if name != "head_dim"}
    return build(Qwen2Config, **rope)


def _gpt2() -> PreTrainedConfig:
    return build(GPT2Config, n_embd=HIDDEN, n_layer=2, n_head=4, n_positions=LONGEST, **_TOKENS)


def _neox() -> PreTrainedConfig:
    return build(
        GPTNeoXConfig,
        hidden_size=HIDDEN,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LONGEST,
        **_TOKENS,
    )


def _falcon_rotary() -> PreTrainedConfig:
    return build(FalconConfig, hidden_size=HIDDEN, num_hidden_layers=2, num_attention_heads=4, alibi=False, **_TOKENS)


CONFIGS: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "llama": lambda: build(LlamaConfig, **_ROPE),
    "qwen2": _qwen2,
    "qwen3": lambda: build(Qwen3Config, **_ROPE),
    "gpt2": _gpt2,
    "neox": _neox,
    "mistral": lambda: build(MistralConfig, sliding_window=WINDOW, **_ROPE),
    "gemma2": lambda: build(Gemma2Config, sliding_window=WINDOW, attn_implementation="eager", **_ROPE),
    "gemma3": lambda: build(
        Gemma3TextConfig, sliding_window=WINDOW, layer_types=["sliding_attention", "full_attention"], **_ROPE
    ),
    "falcon": _falcon_rotary,
}
"""The architectures that are served, by a short name."""

PLAIN = ("llama", "qwen2", "qwen3", "gpt2", "neox")
"""Those without a sliding window."""

WINDOWED = ("mistral", "gemma2", "gemma3")
"""Those with one, of :data:`WINDOW` tokens."""


def causal(name: str = "llama", *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """Return a causal LM in training mode with weights drawn from ``seed``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForCausalLM.from_config(CONFIGS[name](), dtype=dtype)
    return model


def scalar(name: str = "llama", *, seed: int = 0, labels: int = 1, pad: int | None = 0) -> PreTrainedModel:
    """Return a sequence-classification model, with one label unless told otherwise, in training mode."""
    config = CONFIGS[name]()
    config.num_labels = labels
    config.pad_token_id = pad
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config)
    return model
