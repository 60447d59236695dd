"""The fixed models and rollouts behind the golden values; the same wherever and whenever they are made."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedModel

from oppo.events import FloatArray, IntArray

VOCABULARY, PAD, EOS = 48, 47, 46
PROMPT, RESPONSE = (2, 5, 6, 3, 6, 4, 2, 5), 7  # lengths of the eight prompts, and of every response
EARLY = (3, 1, 6, 7, 2, 5, 4, 6)  # tokens of each early response, EOS with them; one has none and is as long as the cap


@dataclass(frozen=True)
class Setting:
    learning_rate: float = 3e-3
    epochs: int = 3
    clip: float = 0.2
    value_clip: float = 0.2
    value_coefficient: float = 0.1
    eps: float = 1e-5
    temperature: float = 0.7
    gamma: float = 0.99
    lam: float = 0.9
    kl: float = 0.1


def numbers(seed: int, *shape: int) -> FloatArray:
    """Return standard normal float32 numbers that no release of numpy changes."""
    legacy = np.random.RandomState(seed)  # its stream is frozen, the new generators' is not (NEP 19)
    return legacy.standard_normal(shape).astype(np.float32)


def fill(model: PreTrainedModel, seed: int) -> None:
    with torch.no_grad():
        for k, (_, parameter) in enumerate(sorted(model.named_parameters())):
            noise = torch.from_numpy(numbers(1000 * seed + k, *parameter.shape))
            parameter.copy_(1 + 0.1 * noise if parameter.ndim == 1 else 0.3 * noise)


def config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, pad_token_id=PAD, eos_token_id=EOS, bos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip


def causal(seed: int) -> LlamaForCausalLM:
    model = LlamaForCausalLM(config())
    fill(model, seed)
    return model


def scalar(seed: int) -> LlamaForSequenceClassification:
    one_label = config()
    one_label.num_labels = 1
    model = LlamaForSequenceClassification(one_label)
    fill(model, seed)
    return model


def prompts() -> list[IntArray]:
    """Return the prompts; neither the padding nor the end token is in them."""
    return [tokens(100 + k, length) for k, length in enumerate(PROMPT)]


def responses() -> list[IntArray]:
    return [tokens(200 + k, RESPONSE) for k in range(len(PROMPT))]


def early() -> list[IntArray]:
    """Return a response to each prompt, padded as TRL pads them: all but one end in EOS before the cap."""
    whole = responses()
    for response, length in zip(whole, EARLY, strict=True):
        if length < RESPONSE:
            response[length - 1], response[length:] = EOS, PAD
    return whole


def tokens(seed: int, length: int) -> IntArray:
    drawn: IntArray = (np.abs(numbers(seed, length) * 1e4).astype(np.int64) % EOS).astype(np.int32)
    return drawn
