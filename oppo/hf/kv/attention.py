"""The kinds of attention by which a model can be served, the fastest first; its config says which one it uses.

::

    segmented   SDPA; rows of any length share a forward pass, and those of similar length attend as one segment
    padded      SDPA; rows that share a forward pass are one rectangle, so each length class has a pass of its own
    eager       padded, by transformers' own formulas, for a model that is loaded so

Segmented attention asks most of a model: segments must reach the attention function as they leave the cache. A model
that looks at keys or values in between, to expand latent ones for example, cannot use segments. No list says which
models do so: :func:`~oppo.hf.probe.probe` tries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.kv import segmented_attention
from oppo.hf.kv.masks import attention

AttentionKind: TypeAlias = Literal["segmented", "padded", "eager"]
Choice: TypeAlias = Literal["auto"] | AttentionKind

CHOICES: tuple[Choice, ...] = ("auto", *get_args(AttentionKind))

COSTS: Mapping[AttentionKind, str] = {
    "segmented": "a row takes the memory and time of rows of similar length",
    "padded": "each row of a batch takes the memory and time of the longest",
    "eager": "each row of a batch takes the memory and time of the longest, and attention weights are held as well",
}
"""What it costs to serve a model by each kind."""


def kinds_of(model: PreTrainedModel) -> tuple[AttentionKind, ...]:
    """Return the kinds of attention that ``model``, as it was loaded, may be tried with, the fastest first.

    Raises:
        ModelRefused: it attends with something that takes no mask for each row.
    """
    if attention(model) == "eager":
        return ("eager",)
    return ("segmented", "padded") if segmented_attention.replaceable(model) else ("padded",)


def attend(model: PreTrainedModel, kind: AttentionKind) -> None:
    """Let ``model`` attend by ``kind`` from now on.

    Raises:
        ModelRefused: it cannot, as it was loaded.
    """
    kinds = kinds_of(model)
    if kind not in kinds:
        raise ModelRefused(
            f"{type(model).__name__} cannot be served with attention {kind!r}: it was loaded with "
            f"{attention(model)!r}, so expected {', '.join(map(repr, kinds))} or 'auto'"
        )
    if "segmented" in kinds:
        segmented_attention.replace(model, padded=kind == "padded")
