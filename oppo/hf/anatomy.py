"""Finding the parts of a transformers model that its type does not name."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel

from oppo.errors import ModelRefused


def backbone(model: PreTrainedModel) -> PreTrainedModel:
    """Return the part of ``model`` that turns token ids into hidden states.

    Raises:
        ModelRefused: there is none that stands on its own.
    """
    found = model.base_model
    if not isinstance(found, PreTrainedModel):
        raise ModelRefused(f"{type(model).__name__} has no transformers backbone, but a {type(found).__name__}")
    return found


def vocabulary(model: PreTrainedModel) -> int:
    """Return how many token ids ``model`` can read.

    Raises:
        ModelRefused: its input embedding is no table.
    """
    table = model.get_input_embeddings()
    if not isinstance(table, nn.Embedding):
        raise ModelRefused(f"{type(model).__name__} reads tokens through a {type(table).__name__}, not an embedding")
    return table.num_embeddings


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
