"""Rows of very different length in one forward pass: rows of similar length attend as one segment.

All rows share the pass's matrices, whose weights are read once. Only attention looks at keys and values, and as one
rectangle those of a batch take what its longest row needs, times the rows: carried rollouts beside fresh ones would
multiply what is held and what is read. So rows are split into segments of similar length; where they take a token each,
only where that saves more than another segment costs. A cache hands out its keys and values as :class:`Segments`, and
the attention function that is registered here with transformers, SDPA in all else, goes over them one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oppo.hf.kv.length_bucketing import cheapest_groups

NAME = "sdpa_segmented"
"""What this implementation of attention is called in a model's config; a saved config does not mention it."""

PADDED = "sdpa_padded"
"""What SDPA is called there for a model that is not to be given segments, though its attention could be replaced."""

SEGMENT_BYTES = 256 * 1024
"""Saving so many bytes of keys and values in each layer is worth another segment, which takes time of its own.

On a CPU, of models with 128, 768 and 1,536 bytes a token, it took as long as reading 0.3, 0.6 and 1.1 million of them,
and of the first takes about 0.2 million since there is less around attention. For the others fewer are asked for, since
what is not read is not held either.
"""

UNUSUAL = ("position_bias", "softcap")
"""What some models ask of attention besides a mask and a scale."""

_sdpa = cast("Callable[..., tuple[Tensor, None]]", sdpa_attention_forward)


class Segments(NamedTuple):
    """Keys, or values, of consecutive batch rows: [n_i, heads, columns_i, head_dim] for each segment."""

    tensors: tuple[Tensor, ...]


def segmented(lengths: Sequence[int], overhead: int) -> list[list[int]]:
    """Return indices of ``lengths`` in segments, the longest first; within a segment indices ascend.

    Depends on its arguments alone, so shapes that follow from it are the same whenever the same rows have the same
    lengths.

    Args:
        lengths: of rows, in tokens.
        overhead: what a segment costs besides the keys and values that it reads, in tokens (:func:`overhead_of`).
    """
    return [sorted(segment) for segment in cheapest_groups(lengths, range(len(lengths)), overhead=overhead)]


def overhead_of(bytes_per_token: float) -> int:
    """Return what a segment costs besides the keys and values that it reads, in tokens.

    Args:
        bytes_per_token: of keys and values in one layer.
    """
    return math.ceil(SEGMENT_BYTES / bytes_per_token)


def replaceable(model: PreTrainedModel) -> bool:
    """Return whether ``model`` attends with SDPA, through transformers' interface."""
    implementation = model.config.get_text_config()._attn_implementation  # noqa: SLF001 - no public names
    return implementation in {"sdpa", NAME, PADDED} and model._supports_attention_backend  # noqa: SLF001


def replace(model: PreTrainedModel, *, padded: bool) -> None:
    """Let ``model``, which is :func:`replaceable`, attend in segments from now on, or to ``padded`` rows.

    Nothing changes for forward passes whose cache hands out whole tensors.
    """
    # The setter that checks loads kernels by name.
    model.config.get_text_config()._attn_implementation = PADDED if padded else NAME  # noqa: SLF001


def attend_in_segments(model: PreTrainedModel) -> bool:
    """Let ``model`` attend in segments from now on if it can, unless it was told to attend to padded rows.

    Returns:
        Whether its cache may hand out :class:`Segments`.
    """
    padded = model.config.get_text_config()._attn_implementation == PADDED  # noqa: SLF001 - no public names
    if padded or not replaceable(model):
        return False
    replace(model, padded=False)
    return True


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Segments,
    value: Tensor | Segments,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend as transformers does with SDPA, one segment after the other; return [n, q, heads, head_dim]."""
    if not (isinstance(key, Segments) and isinstance(value, Segments) and attention_mask is not None):
        return _attend(module, query, cast("Tensor", key), cast("Tensor", value), attention_mask, **kwargs), None
    sizes = [len(keys) for keys in key.tensors]
    segments = zip(
        query.split_with_sizes(sizes), key.tensors, value.tensors, attention_mask.split_with_sizes(sizes), strict=True
    )
    seen = [
        _attend(module, queries, keys, values, mask[..., : keys.shape[2]], **kwargs)
        for queries, keys, values, mask in segments
    ]
    return torch.cat(seen), None


def _attend(
    module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **kwargs: object
) -> Tensor:
    """Attend to one rectangle.

    With a single query for each row, heads that share keys stand where its other queries would. So do they in
    transformers' function, but in a short pass what that looks at first takes as long as attention.
    """
    unusual = module.training or any(kwargs.get(name) is not None for name in UNUSUAL)
    if query.shape[2] > 1 or mask is None or mask.shape[1] > 1 or unusual:
        return _sdpa(module, query, keys, values, mask, **kwargs)[0]
    rows, heads, _queries, size = query.shape
    sharing, scale = query.reshape(rows, keys.shape[1], -1, size), cast("float | None", kwargs.get("scaling"))
    seen = scaled_dot_product_attention(sharing, keys, values, attn_mask=mask, scale=scale)
    return seen.reshape(rows, 1, heads, -1)


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(PADDED, sdpa_attention_forward)
for _name in (NAME, PADDED):
    AttentionMaskInterface.register(_name, sdpa_mask)
