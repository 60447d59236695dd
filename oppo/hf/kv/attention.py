"""How a model attends: the kinds of attention that can serve it, the fastest first, and their masks.

::

    segmented   SDPA; rows of any length share a forward pass, and rows of similar length attend as one segment
    padded      SDPA; rows that share a forward pass form one rectangle, so each length class takes a pass of its own
    eager       padded, with transformers' own formulas, for a model that was loaded with eager attention

Segmented attention requires that segments reach the attention function as they leave the cache. A model that reads
keys or values in between, for example to expand latent ones, cannot use it. :func:`~oppo.hf.probe.probe` tries: there
is no list of such models. The model's config records the choice.

transformers passes four-dimensional masks through unchanged. Under SDPA a mask is boolean (true: may attend), except
that of a single token, which is additive: SDPA would convert it again in every layer of a short pass. Under eager
attention a mask is always additive: eager code adds it to the scores, where a boolean mask would be silently wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.kv.segmented_attention import NAME, PADDED

AttentionKind: TypeAlias = Literal["segmented", "padded", "eager"]
Choice: TypeAlias = Literal["auto"] | AttentionKind

CHOICES: tuple[Choice, ...] = ("auto", *get_args(AttentionKind))

COSTS: Mapping[AttentionKind, str] = {
    "segmented": "a row takes the memory and time of rows of similar length",
    "padded": "each row of a batch takes the memory and time of the longest",
    "eager": "each row of a batch takes the memory and time of the longest, and attention weights are held as well",
}
"""The cost of serving a model by each kind."""

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of layers that can be served row by row."""


def attends_eagerly(model: PreTrainedModel) -> bool:
    """Return whether ``model`` attends with transformers' eager formulas instead of SDPA.

    Raises:
        ModelRefused: it attends with a third implementation: only these two take a mask for each row.
    """
    implementation = _implementation(model)
    if implementation in {"eager", "sdpa", NAME, PADDED}:
        return implementation == "eager"
    raise ModelRefused(
        f"{type(model).__name__} attends with {implementation!r}, which takes no mask for each row: "
        "load it with attn_implementation='sdpa' (or 'eager')"
    )


def kinds_of(model: PreTrainedModel) -> tuple[AttentionKind, ...]:
    """Return the kinds of attention to try for ``model`` as it was loaded, the fastest first.

    Raises:
        ModelRefused: its attention takes no mask for each row.
    """
    if attends_eagerly(model):
        return ("eager",)
    return ("segmented", "padded") if model._supports_attention_backend else ("padded",)  # noqa: SLF001


def attend(model: PreTrainedModel, kind: AttentionKind) -> None:
    """Let ``model`` attend by ``kind`` from now on; forward passes over other caches stay as they are.

    Raises:
        ModelRefused: the model cannot attend so, as it was loaded.
    """
    kinds = kinds_of(model)
    if kind not in kinds:
        raise ModelRefused(
            f"{type(model).__name__} cannot be served with attention {kind!r}: it was loaded with "
            f"{'eager' if 'eager' in kinds else 'sdpa'!r}, so expected {', '.join(map(repr, kinds))} or 'auto'"
        )
    if "segmented" in kinds:
        # The setter that checks loads kernels by name.
        model.config.get_text_config()._attn_implementation = NAME if kind == "segmented" else PADDED  # noqa: SLF001


def attend_in_segments(model: PreTrainedModel) -> bool:
    """Let ``model`` attend in segments if it can, unless :func:`attend` chose padded rows; return whether it does."""
    if _implementation(model) == PADDED or "segmented" not in kinds_of(model):
        return False
    attend(model, "segmented")
    return True


def _implementation(model: PreTrainedModel) -> str | None:
    found: str | None = model.config.get_text_config()._attn_implementation  # noqa: SLF001 - transformers has no public name
    return found


def window_of(config: PretrainedConfig) -> int | None:
    """Return the sliding window, in tokens, of the layers that have one; ``None`` without such layers."""
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    return None if window is None or (kinds and SLIDING not in kinds) else int(window)


class Masks:
    """Builds the attention masks of one model from each row's own positions, one for each kind of layer.

    Raises:
        ModelRefused: some layers have neither full nor sliding causal attention.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        text = model.config.get_text_config()
        self._eager = attends_eagerly(model)
        self._dtype = model.dtype
        self._window = window_of(model.config)
        declared = getattr(text, "layer_types", None)
        self._kinds = tuple(dict.fromkeys(declared or [FULL if self._window is None else SLIDING]))
        if unsupported := [kind for kind in self._kinds if kind not in {FULL, SLIDING}]:
            raise ModelRefused(
                f"{type(model).__name__} has layers of kind {', '.join(map(repr, unsupported))}; only full and sliding "
                "causal attention can be served row by row"
            )
        if not declared and getattr(text, "attention_chunk_size", None) is not None:
            raise ModelRefused(f"{type(model).__name__} attends in chunks, which cannot be served row by row")

    def __call__(self, positions: Tensor, end: int) -> Tensor | dict[str, Tensor]:
        """Return the mask [n, 1, q, end] of queries at ``positions`` (int64 [n, q]) over keys ``0 .. end``.

        For a model with several kinds of layers, a mask by the name of each kind.
        """
        keys = torch.arange(end, device=positions.device)
        queries = positions[:, None, :, None]
        causal = keys <= queries
        masks = {}
        for kind in self._kinds:
            allowed = causal & (keys > queries - self._window) if kind == SLIDING and self._window else causal
            masks[kind] = self._encoded(allowed)
        return masks if len(masks) > 1 else masks[self._kinds[0]]

    def _encoded(self, allowed: Tensor) -> Tensor:
        if not self._eager and allowed.shape[2] > 1:
            return allowed
        zeros = torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device)
        return zeros.masked_fill_(~allowed, torch.finfo(self._dtype).min if self._eager else -torch.inf)
