"""Checks that weights belong to the model that ``config.json`` describes: its kind, names, shapes and values."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TypedDict

import torch
from transformers import AutoConfig, PreTrainedModel

from oppo.errors import ConfigError, ModelRefused
from oppo.hf.loading.directory import OBSOLETE
from oppo.hf.loading.kinds import CAUSAL, Kind

HEADS = ("lm_head.", "embed_out.")
"""Prefixes of the weights of a language model's head, which a critic made of it does not use."""


class Info(TypedDict):
    """transformers' loading info of a checkpoint: names of weights, and names with the shapes found and expected."""

    missing_keys: Collection[str]
    unexpected_keys: Collection[str]
    mismatched_keys: Collection[tuple[str, Collection[int], Collection[int]]]


def require_kind(kind: Kind, directory: Path, tensors: Sequence[str], *, trusted: bool) -> None:
    """Check that the architecture has a model of this kind, and that the files hold enough tensors for its depth."""
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    if type(config) not in kind.mapping and kind.auto.__name__ not in getattr(config, "auto_map", ()):
        raise ModelRefused(
            f"the model at {str(directory)!r} is of type {config.model_type!r}, of which transformers has no "
            f"{kind.name}: take one of another architecture"
        )
    depth = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if 0 < len(tensors) < depth:  # first: building so many layers may take hours, even without memory
        raise ConfigError(
            f"{directory / 'config.json'} describes {depth} layers, but there are {len(tensors)} tensors in all: "
            "expected the weights of that model"
        )


def require_fit(
    kind: Kind,
    model: PreTrainedModel,
    info: Info,
    path: str | Path,
    *,
    given: Collection[str] = (),
    new_head: bool = False,
    ignore_unused: bool,
) -> tuple[list[str], list[str]]:
    """Check the weights of a checkpoint by name and shape; return the missing ones of a new head, and the unused ones.

    An adapter's weights, ``given``, are not missing. Constants that the model computes are not unused, nor are weights
    that transformers ignores itself.

    Raises:
        ConfigError: a shape differs, a weight is missing from the backbone or from a head that may not be new, or a
            weight other than those of a head for logits is unused, without ``ignore_unused``.
    """
    checkpoint, has_logits = f"the checkpoint at {str(path)!r}", model.get_output_embeddings() is not None
    if info["mismatched_keys"]:
        wrong = [f"{name} is {list(found)}, not {list(wanted)}" for name, found, wanted in info["mismatched_keys"]]
        raise ConfigError(f"{checkpoint} does not fit {type(model).__name__}: {', '.join(sorted(wrong)[:3])}")
    missing = sorted({*info["missing_keys"]}.difference(given, _named(info["missing_keys"], kind.optional)))
    if backbone := [name for name in missing if name.startswith(f"{model.base_model_prefix}.")]:
        raise ConfigError(f"{checkpoint} has no {first_of(backbone)}: it is incomplete")
    if missing and not new_head:
        why = "; a reward from an untrained head would be noise"
        if kind is CAUSAL:
            why = f", not {', '.join(model.config.architectures or ['an unknown one'])}"
        raise ConfigError(f"{checkpoint} has no {first_of(missing)}: expected a {kind.name}{why}")
    buffers = {name for name, _ in model.named_buffers()}
    unused = sorted(name for name in info["unexpected_keys"] if name not in buffers and not name.endswith(OBSOLETE))
    droppable = () if has_logits else HEADS
    if not ignore_unused and (unknown := [name for name in unused if not name.startswith(droppable)]):
        raise ConfigError(
            f"{checkpoint} has {first_of(unknown)}, which {type(model).__name__} does not use: expected the weights of "
            "the model that config.json describes, and of this kind; if it may do without, set "
            "models.ignore_unused_weights = true"
        )
    return missing, unused


def _named(names: Collection[str], prefixes: tuple[str, ...]) -> list[str]:
    return [name for name in names if prefixes and name.startswith(prefixes)]


def first_of(names: Sequence[str]) -> str:
    """Return the first three names and the number of the rest, for messages."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def require_finite(model: PreTrainedModel, path: str | Path) -> None:
    """Check that no weight is NaN or infinite; otherwise the first symptom would be another error, much later."""
    for name, weight in model.named_parameters():
        if weight.numel() and not torch.stack(torch.aminmax(weight.detach())).isfinite().all():
            raise ConfigError(
                f"{name} of the checkpoint at {str(path)!r} holds NaN or infinite numbers in {weight.dtype}: expected "
                "weights of a training that did not diverge"
            )
