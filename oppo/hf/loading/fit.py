"""Whether weights are those of the model that ``config.json`` describes: by kind, names, shapes, and as numbers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypeAlias, TypedDict

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedModel,
)

from oppo.errors import ConfigError, ModelRefused

Kind: TypeAlias = type[AutoModelForCausalLM | AutoModelForSequenceClassification]

HEADS = ("lm_head.", "embed_out.")
"""How the weights of a head for logits begin, which a causal language model has and a critic made of it does not."""

BYGONE = (".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", "decoder.version")
"""How constants end that older checkpoints of GPT-2, GPT-J, GPT-NeoX and OPT hold, and that models compute today."""


class Info(TypedDict):
    """What transformers says of a checkpoint: names, and names with the shape that came and the one wanted."""

    missing_keys: Collection[str]
    unexpected_keys: Collection[str]
    mismatched_keys: Collection[tuple[str, Collection[int], Collection[int]]]


def require_kind(kind: Kind, directory: Path, tensors: Sequence[str], *, trusted: bool) -> None:
    """Refuse an architecture of which there is no model of this kind, or a depth that no such file could have."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    if kind is AutoModelForCausalLM:
        mapping, wanted = MODEL_FOR_CAUSAL_LM_MAPPING, "causal language model"
    else:
        mapping, wanted = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, "sequence classification model"
    if type(config) not in mapping and kind.__name__ not in getattr(config, "auto_map", ()):
        raise ModelRefused(
            f"the model at {str(directory)!r} is of type {config.model_type!r}, of which transformers has no {wanted}: "
            "take one of another architecture"
        )
    depth = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if 0 < len(tensors) < depth:  # said here, since so many layers may take hours even where they take no memory
        raise ConfigError(
            f"{directory / 'config.json'} describes {depth} layers, but there are {len(tensors)} tensors in all: "
            "expected the weights of that model"
        )


def lacking_of(
    model: PreTrainedModel, info: Info, path: str | Path, *, given: Collection[str] = (), new_head: bool = False
) -> list[str]:
    """Return the weights of a new head: those that neither the checkpoint has nor what is added to it later, ``given``.

    Raises:
        ConfigError: it lacks others, or a head that may not be new, or has weights of other shapes.
    """
    if info["mismatched_keys"]:
        wrong = [f"{name} is {list(came)}, not {list(wanted)}" for name, came, wanted in info["mismatched_keys"]]
        raise ConfigError(
            f"the checkpoint at {str(path)!r} does not fit {type(model).__name__}: {', '.join(sorted(wrong)[:3])}"
        )
    lacking = sorted(set(info["missing_keys"]).difference(given))
    if backbone := [name for name in lacking if name.startswith(f"{model.base_model_prefix}.")]:
        raise ConfigError(f"the checkpoint at {str(path)!r} has no {some(backbone)}: it is incomplete")
    if lacking and not new_head:
        expected = "sequence classification model with one label; a reward from an untrained head would be noise"
        if _has_logits(model):
            expected = f"causal language model, not {', '.join(model.config.architectures or ['an unknown one'])}"
        raise ConfigError(f"the checkpoint at {str(path)!r} has no {some(lacking)}: expected a {expected}")
    return lacking


def unused_of(model: PreTrainedModel, info: Info, path: str | Path, *, ignore: bool) -> list[str]:
    """Return the weights that the model does not use, and may do without: a head for logits, or any if asked to.

    What transformers knows to be of no use is not counted, nor are constants that the model computes.

    Raises:
        ConfigError: there are others.
    """
    buffers = {name for name, _ in model.named_buffers()}
    unused = sorted(name for name in info["unexpected_keys"] if name not in buffers and not name.endswith(BYGONE))
    needless = () if _has_logits(model) else HEADS
    if not ignore and (strange := [name for name in unused if not name.startswith(needless)]):
        raise ConfigError(
            f"the checkpoint at {str(path)!r} has {some(strange)}, which {type(model).__name__} does not use: expected "
            "the weights of the model that config.json describes, and of this kind; if it may do without, set "
            "models.ignore_unused_weights = true"
        )
    return unused


def some(names: Sequence[str]) -> str:
    """Return the first few of many names, and how many there are besides."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def require_finite(model: PreTrainedModel, path: str | Path) -> None:
    """Refuse weights that are not numbers, which would be noticed only where they have spread, as something else."""
    for name, weight in model.named_parameters():
        if weight.numel() and not torch.stack(torch.aminmax(weight.detach())).isfinite().all():
            raise ConfigError(
                f"{name} of the checkpoint at {str(path)!r} holds NaN or infinite numbers in {weight.dtype}: expected "
                "weights of a training that did not diverge"
            )


def _has_logits(model: PreTrainedModel) -> bool:
    return model.get_output_embeddings() is not None
