"""The ways in which a model can attend while it is served, the fastest first; its config says which one it takes.

::

    parts   SDPA; rows of any length share a pass, and those of similar length attend as a rectangle of their own
    whole   SDPA; rows that share a pass are one rectangle, so those of each length class are read in one of their own
    eager   the same by transformers' own formulas, for a model that is loaded so

Parts ask most of a model: they must reach the attention function as they leave the cache. A model that looks at keys or
values in between, to expand latent ones for example, cannot do anything with them. No list says which models do so:
:func:`~oppo.hf.probe.probe` tries.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias, get_args

from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf import parts
from oppo.hf.masks import attention

Way: TypeAlias = Literal["parts", "whole", "eager"]
Choice: TypeAlias = Literal["auto"] | Way

CHOICES: tuple[Choice, ...] = ("auto", *get_args(Way))

COSTS: Mapping[Way, str] = {
    "parts": "a row takes the memory and time of rows of similar length",
    "whole": "each row of a batch takes the memory and time of the longest",
    "eager": "each row of a batch takes the memory and time of the longest, and attention weights are held as well",
}
"""What it costs to serve a model in each way."""


def ways_of(model: PreTrainedModel) -> tuple[Way, ...]:
    """Return the ways that ``model``, as it was loaded, may be tried in, the fastest first.

    Raises:
        ModelRefused: it attends with something that takes no mask for each row.
    """
    if attention(model) == "eager":
        return ("eager",)
    return ("parts", "whole") if parts.replaceable(model) else ("whole",)


def attend(model: PreTrainedModel, way: Way) -> None:
    """Let ``model`` attend in ``way`` from now on.

    Raises:
        ModelRefused: it cannot, as it was loaded.
    """
    ways = ways_of(model)
    if way not in ways:
        raise ModelRefused(
            f"{type(model).__name__} cannot be served with attention {way!r}: it was loaded with {attention(model)!r}, "
            f"so expected {', '.join(map(repr, ways))} or 'auto'"
        )
    if "parts" in ways:
        parts.replace(model, whole=way == "whole")
