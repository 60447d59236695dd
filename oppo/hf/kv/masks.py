"""Who may attend to whom: 4D masks built from each row's own positions, one for each kind of layer.

transformers lets a mask of four dimensions through untouched, so these decide alone. Under SDPA a mask is boolean
(true: may attend), but for a single token additive: SDPA makes it so, and would do it again in every layer of a pass
that is short anyway. Under eager attention it is always additive, because eager code adds whatever it is given and a
boolean one would be silently wrong there.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.kv import segmented_attention

Attention: TypeAlias = Literal["sdpa", "eager"]

FULL = "full_attention"
SLIDING = "sliding_attention"


def attention(model: PreTrainedModel) -> Attention:
    """Return how the model attends.

    Raises:
        ModelRefused: neither with SDPA nor eagerly: no other implementation takes a mask for each row.
    """
    implementation = model.config.get_text_config()._attn_implementation  # noqa: SLF001 - transformers has no public name
    if implementation in {"sdpa", segmented_attention.NAME, segmented_attention.PADDED}:
        return "sdpa"
    if implementation == "eager":
        return "eager"
    raise ModelRefused(
        f"{type(model).__name__} attends with {implementation!r}, which takes no mask for each row: "
        "load it with attn_implementation='sdpa' (or 'eager')"
    )


def window_of(config: PretrainedConfig) -> int | None:
    """Return the sliding window, in tokens, of the layers that have one; ``None`` when no layer does."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    return None if window is None or (kinds and SLIDING not in kinds) else int(window)


class Masks:
    """Builds the masks of one model.

    Raises:
        ModelRefused: at construction, when some layers attend in a way for which there is no mask here.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        text = model.config.get_text_config()
        self._additive = attention(model) == "eager"
        self._dtype = model.dtype
        self._window = window_of(model.config)
        declared = getattr(text, "layer_types", None)
        self._kinds = tuple(dict.fromkeys(declared or [FULL if self._window is None else SLIDING]))
        strange = [kind for kind in self._kinds if kind not in {FULL, SLIDING}]
        if strange:
            raise ModelRefused(
                f"{type(model).__name__} has layers of kind {', '.join(map(repr, strange))}; only full and sliding "
                "causal attention can be served row by row"
            )
        if not declared and getattr(text, "attention_chunk_size", None) is not None:
            raise ModelRefused(f"{type(model).__name__} attends in chunks, which cannot be served row by row")

    def __call__(self, positions: Tensor, end: int) -> Tensor | dict[str, Tensor]:
        """Return the mask [n, 1, q, end] of queries at ``positions`` (int64 [n, q]) over keys ``0 .. end``.

        A model with several kinds of layers gets one for each, by the kind's name.
        """
        keys = torch.arange(end, device=positions.device)
        queries = positions[:, None, :, None]
        causal = keys <= queries
        masks = {}
        for kind in self._kinds:
            seen = causal & (keys > queries - self._window) if kind == SLIDING and self._window else causal
            masks[kind] = self._written(seen)
        return masks if len(masks) > 1 else masks[self._kinds[0]]

    def _written(self, seen: Tensor) -> Tensor:
        if not self._additive and seen.shape[2] > 1:
            return seen
        nothing = torch.zeros(seen.shape, dtype=self._dtype, device=seen.device)
        return nothing.masked_fill_(~seen, torch.finfo(self._dtype).min if self._additive else -torch.inf)
