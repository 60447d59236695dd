"""Parts and limits of a transformers model that its type does not name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from oppo.errors import ModelRefused
from oppo.models import Passes
from oppo.simulate.profile import Transformer

UNLIMITED = 1 << 20  # the longest sequence of a model whose config names no limit

FAILURES: Final = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""Errors of a model that cannot read its input."""

ONLY_WHOLE: Final = "_oppo_only_whole"
"""The attribute of a backbone that cannot continue a sequence: the reason. Copies, and other processes, have it too."""


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    base = model.base_model
    if base is model:  # of a head under another name than the type's own, as of Llama 4
        base = getattr(model, "model", model)
    if not isinstance(base, PreTrainedModel):
        raise ModelRefused(f"{type(model).__name__} has no transformers backbone, but a {type(base).__name__}")
    return base


def keeps_logits(model: PreTrainedModel) -> bool:
    return takes(model, "logits_to_keep")


def cache_argument(model: PreTrainedModel) -> str | None:
    # ``past_key_values`` is ``cache`` since transformers 5.24, but for models whose code is not theirs.
    return next((name for name in ("cache", "past_key_values", "cache_params") if takes(model, name)), None)


def only_whole(model: PreTrainedModel) -> str | None:
    """Return why the probe found that ``model`` cannot continue a sequence; ``None``: it can."""
    found: str | None = getattr(backbone(model), ONLY_WHOLE, None)
    return found


def set_only_whole(model: PreTrainedModel, reason: str | None) -> None:
    setattr(backbone(model), ONLY_WHOLE, reason)


def require_pieces(model: PreTrainedModel) -> None:
    if reason := only_whole(model):
        raise ModelRefused(
            f"{reason}. So it can be a reference, a reward model or a critic, and be trained, but not decode here: "
            "vLLM may serve it (models.engine = 'vllm')"
        )


def takes(model: PreTrainedModel, argument: str) -> bool:
    return argument in inspect.signature(model.forward).parameters


def vocabulary(model: PreTrainedModel) -> int:
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise ModelRefused(f"{type(model).__name__} reads tokens through a {type(table).__name__}, not an embedding")
    return table.num_embeddings


def end_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the model's generation config, possibly more than the tokenizer's one."""
    ids = model.generation_config.eos_token_id if model.generation_config is not None else None
    return tuple(ids) if isinstance(ids, list) else (ids,) if isinstance(ids, int) else ()


def longest(model: PreTrainedModel) -> int:
    return reach(model.config)


def reach(config: PreTrainedConfig) -> int:
    """Return the longest sequence for which the encoding of a position never depends on the length."""
    # With longrope the original length: beyond it transformers changes the rotary frequencies of all positions of a
    # pass, but cached keys and other rows need the old ones.
    text = config.get_text_config()
    limit = int(getattr(text, "max_position_embeddings", None) or UNLIMITED)
    rope: Mapping[str, Any] = getattr(text, "rope_parameters", None) or {}
    groups = [rope, *(group for group in rope.values() if isinstance(group, Mapping))]  # for each kind of layer
    original = [
        int(group["original_max_position_embeddings"]) for group in groups if group.get("rope_type") == "longrope"
    ]
    return min([limit, *original])


def has_experts(model: PreTrainedModel) -> bool:
    return _of_experts(model, *_EXPERTS) > 1


_EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")


def _of_experts(model: PreTrainedModel, *names: str) -> int:
    text = model.config.get_text_config()
    sections = (text, getattr(text, "ffn_config", None))  # DBRX has them in the latter
    return max(int(getattr(section, name, None) or 0) for section in sections for name in names)


_PAIRED: Final = ("full_attention", "attention", "hybrid")
"""The kinds of layers in which a token attends to all before it."""


def passes_at(speed: float, model: PreTrainedModel, *, epochs: float = 0) -> Passes:
    """Return the costs of a forward pass or, with ``epochs``, of that many forward and backward passes, at FLOP/s."""
    # A matrix takes two FLOP a number and token, as many for the gradient of its input and, where trained, for its own.
    # Of experts those that a token has count. Tables, norms, attention within a window and recomputation do not.
    text, tables = model.config.get_text_config(), (nn.Embedding, nn.EmbeddingBag)
    experts = _of_experts(model, *_EXPERTS)
    share = (_of_experts(model, "num_experts_per_tok", "moe_top_k") or experts) / max(1, experts)
    towers = [part for part in model.modules() if getattr(part, "main_input_name", "") == "pixel_values"]
    seen = {id(weight) for tower in towers if tower is not model for weight in tower.parameters()}
    numbers = 0.0
    for name, module in model.named_modules():
        for weight in () if isinstance(module, tables) else module.parameters(recurse=False):
            if weight.ndim > 1 and id(weight) not in seen:
                seen.add(id(weight))
                passes = epochs * (2 + weight.requires_grad) if epochs else 1
                of_experts = "experts" in name.split(".") or (weight.ndim == 3 and len(weight) == experts)
                numbers += passes * weight.numel() * (share if of_experts else 1)
    heads = int(getattr(text, "num_attention_heads", None) or 0)
    width = int(getattr(text, "head_dim", None) or getattr(text, "hidden_size", 0) // max(1, heads))
    widths = int(getattr(text, "qk_head_dim", None) or width) + int(getattr(text, "v_head_dim", None) or width)
    windowed = getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True)
    kinds = getattr(text, "layer_types", None) or (0 if windowed else int(text.num_hidden_layers)) * _PAIRED[:1]
    layers = sum(kind in _PAIRED for kind in kinds)
    return Passes(token=2 * numbers / speed, pair=2 * (3 * epochs or 1) * layers * heads * widths / speed)


def transformer(model: PreTrainedModel) -> Transformer:
    text, numbers = model.config.get_text_config(), passes_at(1.0, model).token / 2
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Transformer(
        parameters=numbers + (0 if model.get_output_embeddings() is not None else text.vocab_size * text.hidden_size),
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        cached=heads * width,
        vocabulary=text.vocab_size,
        tied=True,  # the table of the embedding is not among these numbers
    )


PADS: Final = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
"""Where a config has the ids whose embeddings the features of a tower replace."""


def pads_of(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the ids that features replace, the images' first; empty for a model of text."""
    found = (getattr(config, name, None) for name in PADS)
    return tuple(dict.fromkeys(each for each in found if isinstance(each, int) and each >= 0))


def score_head(model: PreTrainedModel) -> nn.Module:
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Module):
        raise ModelRefused(
            f"{type(model).__name__} has no score layer on its last hidden state: expected a model loaded with "
            "AutoModelForSequenceClassification, of a decoder architecture"
        )
    if model.config.num_labels != 1:
        raise ModelRefused(
            f"{type(model).__name__} gives {model.config.num_labels} numbers for a sequence, but a score is one: "
            "load it with num_labels=1"
        )
    return head


def token_head(model: PreTrainedModel) -> nn.Module:
    heads = (getattr(model, name, None) for name in ("score", "classifier"))
    head = next((head for head in heads if isinstance(head, nn.Linear)), None)
    if head is None:
        raise ModelRefused(
            f"{type(model).__name__} has no linear layer on its last hidden state: expected a model loaded with "
            "AutoModelForTokenClassification, of a decoder architecture"
        )
    return head
