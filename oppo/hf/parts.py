"""Rows of very different length in one forward pass: each part of them attends to a rectangle of its own.

All rows share the pass's matrices, whose weights are read once. Only attention looks at keys and values, and as one
rectangle those of a batch take what its longest row needs, times the rows: carried rollouts beside fresh ones would
multiply what is held and what is read. So rows are split into parts of similar length. A cache hands out its keys and
values as :class:`Parts`, and the attention function that is registered here with transformers, SDPA in all else, goes
over them one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

NAME = "sdpa_in_parts"
"""What this implementation of attention is called in a model's config; a saved config does not mention it."""

WASTE = 1.25
"""Rows are split while their rectangle is larger by this factor than what they need."""

_sdpa = cast("Callable[..., tuple[Tensor, None]]", sdpa_attention_forward)


class Parts(NamedTuple):
    """Keys, or values, of consecutive batch rows: [n_i, heads, columns_i, head_dim] for each part."""

    tensors: tuple[Tensor, ...]


def parted(lengths: Sequence[int], waste: float = WASTE) -> list[list[int]]:
    """Return indices of ``lengths`` in parts, the longest first, none of which wastes more than the factor ``waste``.

    A part is split where that saves most. Within a part indices ascend. Depends on the lengths alone, so shapes that
    follow from it are the same whenever the same rows have the same lengths.
    """
    order = sorted(range(len(lengths)), key=lambda at: -lengths[at])
    return [sorted(part) for part in _split(order, lengths, waste)]


def _split(order: list[int], lengths: Sequence[int], waste: float) -> list[list[int]]:
    longest, count = lengths[order[0]], len(order)
    if longest * count <= waste * sum(lengths[at] for at in order):
        return [order]
    # Splitting off the rows from ``at`` on saves the columns that the longest of them lacks, for each of them.
    at = max(range(1, count), key=lambda at: (count - at) * (longest - lengths[order[at]]))
    return _split(order[:at], lengths, waste) + _split(order[at:], lengths, waste)


def attend_in_parts(model: PreTrainedModel) -> bool:
    """Let ``model`` attend in parts from now on if it attends with SDPA, through transformers' interface.

    Nothing changes for forward passes whose cache hands out whole tensors.

    Returns:
        Whether its cache may hand out :class:`Parts`.
    """
    text = model.config.get_text_config()
    if text._attn_implementation == "sdpa" and model._supports_attention_backend:  # noqa: SLF001 - no public names
        text._attn_implementation = NAME  # noqa: SLF001 - the setter that checks loads kernels by name
    return bool(text._attn_implementation == NAME)  # noqa: SLF001


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Parts,
    value: Tensor | Parts,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """Attend, [n, q, heads, head_dim]: with SDPA as transformers does, part by part where there are parts."""
    if not isinstance(key, Parts) or not isinstance(value, Parts):
        return _sdpa(module, query, key, value, attention_mask, **kwargs)
    seen, first = list[Tensor](), 0
    for keys, values in zip(key.tensors, value.tensors, strict=True):
        rows = slice(first, first + len(keys))
        mask = None if attention_mask is None else attention_mask[rows, :, :, : keys.shape[2]]
        seen.append(_sdpa(module, query[rows], keys, values, mask, **kwargs)[0])
        first = rows.stop
    return torch.cat(seen), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
