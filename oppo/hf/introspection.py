"""Finding the parts of a transformers model that its type does not name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping

from torch import nn
from transformers import PreTrainedModel

from oppo.errors import ModelRefused

UNLIMITED = 1 << 20
"""The longest sequence of a model whose config names no limit."""


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of ``model`` that turns token ids into hidden states.

    Raises:
        ModelRefused: there is none that stands on its own.
    """
    found = model.base_model
    if not isinstance(found, PreTrainedModel):
        raise ModelRefused(f"{type(model).__name__} has no transformers backbone, but a {type(found).__name__}")
    return found


def keeps_logits(model: PreTrainedModel) -> bool:
    """Return whether a forward pass can be told, by ``logits_to_keep``, at which positions logits are wanted."""
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def vocabulary(model: PreTrainedModel) -> int:
    """Return how many token ids ``model`` can read.

    Raises:
        ModelRefused: its input embedding is no table.
    """
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise ModelRefused(f"{type(model).__name__} reads tokens through a {type(table).__name__}, not an embedding")
    return table.num_embeddings


def end_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """Return the end-of-sequence ids of the model's generation config; it may have more than the tokenizer's one."""
    own = model.generation_config.eos_token_id if model.generation_config is not None else None
    return tuple(own) if isinstance(own, list) else (own,) if isinstance(own, int) else ()


def longest(model: PreTrainedModel) -> int:
    """Return how many tokens a sequence may have, so that every position can be read and none changes another's.

    The end of the position table, or the length the model was trained for. With ``longrope`` it is the *original*
    length: past it transformers turns to other rotary frequencies for all positions of a forward pass at once, which
    neither keys that are kept already nor other rows of the pass could follow. (``dynamic`` frequencies change past
    ``max_position_embeddings``, which is the limit anyway.)
    """
    text = model.config.get_text_config()
    limit = int(getattr(text, "max_position_embeddings", None) or UNLIMITED)
    original = [
        int(rope["original_max_position_embeddings"])
        for rope in _ropes(getattr(text, "rope_parameters", None))
        if rope.get("rope_type") == "longrope"
    ]
    return min([limit, *original])


def _ropes(parameters: object) -> Iterator[Mapping[str, int | float | str]]:
    """Yield the rotary settings of a config: one group, or one for each kind of layer."""
    if isinstance(parameters, Mapping):
        yield parameters
        for group in parameters.values():
            yield from _ropes(group)


def routed(model: PreTrainedModel) -> bool:
    """Return whether ``model`` is a mixture of experts.

    Its router picks experts by comparing numbers: where two are nearly equal, rounding picks, and the outputs jump.
    """
    text = model.config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return any((getattr(text, name, None) or 0) > 1 for name in names)


def score_head(model: PreTrainedModel) -> nn.Module:
    """Return the layer that turns a hidden state of a sequence-classification model into one number.

    Raises:
        ModelRefused: it gives several numbers, or there is no such layer.
    """
    if model.config.num_labels != 1:
        raise ModelRefused(
            f"{type(model).__name__} gives {model.config.num_labels} numbers for a sequence, but a score is one: "
            "load it with num_labels=1"
        )
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Module):
        raise ModelRefused(
            f"{type(model).__name__} has no score layer on its last hidden state: expected a model loaded with "
            "AutoModelForSequenceClassification, of a decoder architecture"
        )
    return head
