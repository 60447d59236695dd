"""Segmented attention: rows of any length share a forward pass, and rows of similar length attend as one segment.

All rows share the matrix products of the pass, which read the weights once. Only attention reads keys and values, and
in one rectangle every row takes the columns of the longest: carried rollouts beside fresh ones would multiply memory
and time. So rows are split into segments of similar length; decode steps split them only where that saves more than
another segment costs. The cache hands out its keys and values as :class:`Segments`, and the attention function that
this module registers with transformers, SDPA in all else, computes them one by one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oppo.hf.kv.length_bucketing import cheapest_groups

NAME = "sdpa_segmented"
"""The name of this attention implementation in a model's config; a saved config does not mention it."""

PADDED = "sdpa_padded"
"""The name of plain SDPA in the config of a model that takes no segments, though its attention could be replaced."""

SEGMENT_BYTES = 256 * 1024
"""The fixed time of a segment, as bytes of keys and values per layer that take as long to read.

Measured on a CPU with models of 128, 768 and 1,536 bytes per token: 0.2, 0.6 and 1.1 million bytes. For the larger
models the constant is lower than measured, since bytes that are not read need no memory either.
"""

LAUNCHED_SEGMENT_BYTES = 128 * 2**20
"""The same on a GPU, where a segment is some 130 kernel launches a step: an estimate, never measured.

In practice the rows of a decode step are one segment there.
"""

UNUSUAL = ("position_bias", "softcap")
"""Arguments that some models give attention besides a mask and a scale."""

_sdpa = cast("Callable[..., tuple[Tensor, None]]", sdpa_attention_forward)


class Segments(NamedTuple):
    """Keys, or values, of consecutive batch rows: [n_i, heads, columns_i, head_dim] for each segment."""

    tensors: tuple[Tensor, ...]


def segmented(lengths: Sequence[int], overhead: int) -> list[list[int]]:
    """Return indices of ``lengths`` in segments, the longest first; within a segment indices ascend.

    The result depends on the arguments alone, and so do the shapes of a decode step.

    Args:
        lengths: of rows, in tokens.
        overhead: fixed cost of a segment, in tokens read (:func:`overhead_of`).
    """
    return [sorted(segment) for segment in cheapest_groups(lengths, range(len(lengths)), overhead=overhead)]


def overhead_of(bytes_per_token: float, device: torch.device) -> int:
    """Return the fixed cost of a segment in tokens read, for ``bytes_per_token`` of KV cache in one layer."""
    return math.ceil((SEGMENT_BYTES if device.type == "cpu" else LAUNCHED_SEGMENT_BYTES) / bytes_per_token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Segments,
    value: Tensor | Segments,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Return SDPA's output [n, q, heads, head_dim], computed segment by segment."""
    if not (isinstance(key, Segments) and isinstance(value, Segments) and attention_mask is not None):
        return _attend(module, query, cast("Tensor", key), cast("Tensor", value), attention_mask, **kwargs), None
    sizes = [len(keys) for keys in key.tensors]
    segments = zip(
        query.split_with_sizes(sizes), key.tensors, value.tensors, attention_mask.split_with_sizes(sizes), strict=True
    )
    outputs = [
        _attend(module, queries, keys, values, mask[..., : keys.shape[2]], **kwargs)
        for queries, keys, values, mask in segments
    ]
    return torch.cat(outputs), None


def _attend(
    module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **kwargs: object
) -> Tensor:
    """Return SDPA's output for one rectangle.

    With one query per row, the heads that share a key head become its queries. transformers' function does the same,
    but its checks take as long as attention itself in a short pass.
    """
    unusual = module.training or any(kwargs.get(name) is not None for name in UNUSUAL)
    if query.shape[2] > 1 or mask is None or mask.shape[1] > 1 or unusual:
        return _sdpa(module, query, keys, values, mask, **kwargs)[0]
    rows, heads, _queries, size = query.shape
    grouped, scale = query.reshape(rows, keys.shape[1], -1, size), cast("float | None", kwargs.get("scaling"))
    output = scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(rows, 1, heads, -1)


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(PADDED, sdpa_attention_forward)
for _name in (NAME, PADDED):
    AttentionMaskInterface.register(_name, sdpa_mask)
