"""How a model attends to the KV cache: the kinds of attention that can serve it, the fastest first, and their masks.

::

    segmented   SDPA; rows of any length share a forward pass, and rows of similar length attend as one segment
    padded      SDPA; rows that share a forward pass form one rectangle, so each length class takes a pass of its own
    eager       padded, with transformers' own formulas, for a model that was loaded with eager attention

All rows of a segmented pass share its matrix products, which read the weights once. Only attention reads the KV cache,
and in one rectangle every row takes the columns of the longest: deferred rollouts beside fresh ones would multiply
memory and time. So rows are split into segments of similar length; decode steps split them only where that saves more
than another segment costs. The cache hands out keys and values as :class:`Segments`, and the attention function that
this module registers with transformers, SDPA in all else, computes them one by one.

Segmented attention requires that segments reach the attention function as they leave the cache. Latent keys and values
are expanded segment by segment (:func:`expand_in_segments`); a model that reads them otherwise in between cannot use
it. :func:`~oppo.hf.servable.probe` tries: there is no list of such models. The model's config records the choice.

Segments, and the padded groups of rows that share a pass, are those of least total cost (:func:`cheapest_groups`).

transformers passes four-dimensional masks through unchanged. Under SDPA a mask is boolean (true: may attend), except
that of a single token, which is additive: SDPA would convert it again in every layer of a short pass. Under eager
attention a mask is always additive: eager code adds it to the scores, where a boolean mask would be silently wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple, TypeAlias, cast, get_args

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from oppo.errors import ModelRefused
from oppo.hf.head import AGREEMENT
from oppo.hf.model_parts import FAILURES, backbone, takes
from oppo.observe import set_to

AttentionKind: TypeAlias = Literal["segmented", "padded", "eager"]

Choice: TypeAlias = Literal["auto"] | AttentionKind

CHOICES: tuple[Choice, ...] = ("auto", *get_args(AttentionKind))

COSTS: Mapping[AttentionKind, str] = {
    "segmented": "a row takes the memory and time of rows of similar length",
    "padded": "each row of a batch takes the memory and time of the longest",
    "eager": "each row of a batch takes the memory and time of the longest, and attention weights are held as well",
}

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
"""The kinds of attention layers that can be served row by row."""

INDEXED = "indexed_attention"
"""The kind of layers whose tokens attend to the keys that an indexer picks, which keeps keys of its own."""

STATES = ("linear_attention", "mamba", "conv")
"""The kinds of layers with a state in place of a KV cache (:mod:`oppo.hf.kv.states`): they take no mask."""

MASKS: Mapping[str, str | None] = (
    {kind: kind for kind in (FULL, SLIDING, CHUNKED)}
    | dict.fromkeys((*STATES, "moe", "mlp"))
    | {"hybrid": FULL, "attention": FULL, INDEXED: FULL}
)
"""The attention by whose mask a kind of layer attends; ``None``: it does not attend."""


def attends_eagerly(model: PreTrainedModel) -> bool:
    implementation = _implementation(model)
    if implementation in {"eager", "sdpa", NAME, PADDED}:
        return implementation == "eager"
    raise ModelRefused(
        f"{type(model).__name__} attends with {implementation!r}, which takes no mask for each row: "
        "load it with attn_implementation='sdpa' (or 'eager')"
    )


def kinds_of(model: PreTrainedModel) -> tuple[AttentionKind, ...]:
    if attends_eagerly(model):
        return ("eager",)
    if INDEXED in layer_kinds(model.config):  # transformers honours a choice only under its own names
        return ("padded",)
    return ("segmented", "padded") if model._supports_attention_backend else ("padded",)  # noqa: SLF001


def attend(model: PreTrainedModel, kind: AttentionKind) -> None:
    kinds = kinds_of(model)
    if kind not in kinds:
        raise ModelRefused(
            f"{type(model).__name__} cannot be served with attention {kind!r}: it was loaded with "
            f"{'eager' if 'eager' in kinds else 'sdpa'!r}, so expected {', '.join(map(repr, kinds))} or 'auto'"
        )
    if "segmented" in kinds:
        # The setter that checks loads kernels by name.
        model.config.get_text_config()._attn_implementation = NAME if kind == "segmented" else PADDED  # noqa: SLF001


@contextmanager
def attending_as_loaded(model: PreTrainedModel) -> Iterator[None]:
    # transformers' models branch on the name by which a model was loaded.
    text, name = model.config.get_text_config(), _implementation(model)
    attend_as_loaded(model)
    try:
        yield
    finally:
        text._attn_implementation = name  # noqa: SLF001


def attend_as_loaded(model: PreTrainedModel) -> None:
    if _implementation(model) in {NAME, PADDED}:
        model.config.get_text_config()._attn_implementation = "sdpa"  # noqa: SLF001


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
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    return None if window is None or (kinds and SLIDING not in kinds) else int(window)


def layer_kinds(config: PretrainedConfig) -> tuple[str, ...]:
    text = config.get_text_config()
    if declared := getattr(text, "layer_types", None):
        return tuple(dict.fromkeys(declared))
    if window_of(config) is not None:
        return (SLIDING,)
    return (FULL if getattr(text, "attention_chunk_size", None) is None else CHUNKED,)


class Masks:
    def __init__(self, model: PreTrainedModel) -> None:
        text = model.config.get_text_config()
        self._eager = attends_eagerly(model)
        self._dtype = model.dtype
        self._window = window_of(model.config)
        self._chunk = getattr(text, "attention_chunk_size", None)
        layers = layer_kinds(model.config)
        if unsupported := [kind for kind in layers if kind not in MASKS]:
            raise ModelRefused(
                f"{type(model).__name__} has layers of kind {', '.join(map(repr, unsupported))}; those that can be "
                f"served row by row are {', '.join(map(repr, MASKS))}"
            )
        self._masks = {kind: MASKS[kind] for kind in layers}
        if any(kind in STATES or kind == "hybrid" for kind in layers):
            # Such a model asks for masks by names that its layers do not have.
            self._masks |= dict.fromkeys((*layers, FULL, "attention"), FULL) | dict.fromkeys((*STATES, "moe", "mlp"))
        self._kinds = tuple({kind: None for kind in map(MASKS.get, layers) if kind is not None})

    def __call__(
        self, positions: Tensor, end: int, blocks: Tensor | None = None
    ) -> Tensor | dict[str, Tensor | None] | None:
        """Return the mask [n, 1, q, end] of queries at ``positions`` (int64 [n, q]) over keys ``0 .. end``."""
        # blocks: int64 [n, end], the number of the image at each key, whose tokens attend to all of it; -1: none.
        # For several kinds of layers, a mask by the name of each kind; None where no layer attends.
        if not self._kinds:
            return None
        keys = torch.arange(end, device=positions.device)
        queries = positions[:, None, :, None]
        causal = keys <= queries
        if blocks is not None:
            own = blocks.gather(1, positions)[:, None, :, None]
            causal = causal | ((own == blocks[:, None, None]) & (own >= 0))
        masks: dict[str | None, Tensor | None] = {None: None}
        for kind in self._kinds:
            allowed = causal
            if kind == SLIDING and self._window:
                allowed = causal & (keys > queries - self._window)
            elif kind == CHUNKED and self._chunk:
                allowed = causal & (keys // self._chunk == queries // self._chunk)
            masks[kind] = self._encoded(allowed)
        if len(self._masks) > 1 or INDEXED in self._masks:
            return {name: masks[kind] for name, kind in self._masks.items()}
        return masks[self._kinds[0]]

    def _encoded(self, allowed: Tensor) -> Tensor:
        if not self._eager and allowed.shape[2] > 1:
            return allowed
        zeros = torch.zeros(allowed.shape, dtype=self._dtype, device=allowed.device)
        return zeros.masked_fill_(~allowed, torch.finfo(self._dtype).min if self._eager else -torch.inf)


NAME = "sdpa_segmented"
"""The name of this attention implementation in a model's config; a saved config does not mention it."""

PADDED = "sdpa_padded"
"""The name of plain SDPA in the config of a model that takes no segments, though its attention could be replaced."""

SEGMENT_BYTES = 256 * 1024
"""The fixed time of a segment, as bytes of KV cache per layer that take as long to read.

Measured on a CPU with models of 128, 768 and 1,536 bytes per token: 0.2, 0.6 and 1.1 million bytes. For the larger
models the constant is lower than measured, since bytes that are not read need no memory either.
"""

LAUNCHED_SEGMENT_BYTES = 128 * 2**20
"""The same on a GPU, where a segment is some 130 kernel launches a step: an estimate, never measured.

In practice the rows of a decode step are one segment there.
"""

PACKED_TRIAL: Final = (3, 5)  # lengths of the rows, in tokens, on which a model shows that it can read packed rows
UNUSUAL = ("position_bias", "softcap")  # arguments that some models give attention besides a mask and a scale

_sdpa = cast("Callable[..., tuple[Tensor, None]]", sdpa_attention_forward)


class Segments(NamedTuple):
    """Keys, or values, of consecutive batch rows: [n_i, heads, columns_i, head_dim] for each segment."""

    tensors: tuple[Tensor, ...]


def expand_in_segments(model: PreTrainedModel) -> None:
    # Of layers whose cache holds latents.
    for module in model.modules():
        layer: Any = module
        if hasattr(layer, "expand_kv") and not isinstance(layer.expand_kv, partial):
            layer.expand_kv = partial(_expanded, layer.expand_kv)


def _expanded(
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], latents: Tensor | Segments, rotary: Tensor | Segments
) -> tuple[Tensor | Segments, Tensor | Segments]:
    if not (isinstance(latents, Segments) and isinstance(rotary, Segments)):
        return expand(cast("Tensor", latents), cast("Tensor", rotary))
    keys, values = zip(*map(expand, latents.tensors, rotary.tensors), strict=True)
    return Segments(keys), Segments(values)


def segmented(lengths: Sequence[int], overhead: int) -> list[list[int]]:
    """Return indices of ``lengths`` in segments, the longest first; each segment costs ``overhead``."""
    # It depends on the arguments alone, and so do the shapes of a decode step.
    return [sorted(segment) for segment in cheapest_groups(lengths, range(len(lengths)), overhead=overhead)]


def segment_overhead(bytes_per_token: float, device: torch.device) -> int:
    """Return the fixed cost of a segment in tokens read, for ``bytes_per_token`` of KV cache in one layer."""
    return math.ceil((SEGMENT_BYTES if device.type == "cpu" else LAUNCHED_SEGMENT_BYTES) / bytes_per_token)


class Packed:
    """Rows of these lengths that lie end to end in a pass over one row [1, T]."""

    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self._starts: Tensor | None = None

    def starts(self, device: torch.device) -> Tensor:
        """Return where rows begin, and where the last one ends: int32 [n + 1]; sent to the device once."""
        if self._starts is None:
            self._starts = torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=device)
        return self._starts


def rows_apart(packed: Packed | None) -> AbstractContextManager[None]:
    return set_to(_packed, packed)


def packed_rows() -> Packed | None:
    return _packed.get()


def packs(model: PreTrainedModel, longest: int) -> bool:
    """Whether attention alone can tell packed rows of at most ``longest`` tokens apart."""
    text, device = model.config.get_text_config(), model.device.type
    limits = (window_of(model.config), getattr(text, "attention_chunk_size", None))
    return (
        _implementation(model) == NAME
        and {FULL, SLIDING, CHUNKED}.issuperset(layer_kinds(model.config))
        and all(limit is None or longest <= limit for limit in limits)
        and (device in {"cpu", "meta"} or (device == "cuda" and model.dtype.itemsize == 2))
    )


def packed_mask(model: PreTrainedModel) -> Tensor | dict[str, Tensor]:
    """Return a mask that transformers passes on as it is, and attention does not read."""
    mask, kinds = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=model.device), layer_kinds(model.config)
    return mask if len(kinds) == 1 else dict.fromkeys(kinds, mask)


@torch.no_grad()
def reads_packed(model: PreTrainedModel) -> bool:
    # Tried on two short rows.
    if not (takes(backbone(model), "position_ids") and attend_in_segments(model) and packs(model, PACKED_TRIAL[-1])):
        return False
    if model.device.type == "meta":  # without weights there is nothing to compare
        return True
    trunk, device = backbone(model), model.device
    ids = torch.arange(2, 2 + sum(PACKED_TRIAL), device=device)[None]
    positions = torch.cat([torch.arange(length, device=device) for length in PACKED_TRIAL])[None]
    try:
        alone = [trunk(each, use_cache=False).last_hidden_state for each in ids.split(PACKED_TRIAL, dim=1)]
        with rows_apart(Packed(PACKED_TRIAL)):
            read = trunk(ids, attention_mask=packed_mask(trunk), position_ids=positions, use_cache=False)
        apart = (read.last_hidden_state - torch.cat(alone, dim=1)).float().abs().max()
    except FAILURES:
        return False
    largest = max(float(each.float().abs().max()) for each in alone)
    return float(apart) <= max(AGREEMENT, 8 * torch.finfo(model.dtype).eps) * largest


_packed: ContextVar[Packed | None] = ContextVar("packed", default=None)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor | Segments,
    value: Tensor | Segments,
    attention_mask: Tensor | None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    if (packed := _packed.get()) is not None and isinstance(key, Tensor) and isinstance(value, Tensor):
        if query.device.type == "cuda":
            return _packed_attention(packed, query, key, value, cast("float | None", kwargs.get("scaling"))), None
        rows = zip(*(each.split_with_sizes(packed.lengths, dim=2) for each in (query, key, value)), strict=True)
        return torch.cat([_sdpa(module, *row, None, **kwargs)[0] for row in rows], dim=1), None
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


def _packed_attention(packed: Packed, query: Tensor, key: Tensor, value: Tensor, scale: float | None) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn  # noqa: PLC0415 - not in every torch that serves

    groups = query.shape[1] // key.shape[1]
    keys, values = (each[0].transpose(0, 1).repeat_interleave(groups, dim=1) for each in (key, value))
    starts, longest = packed.starts(query.device), max(packed.lengths)
    queries, causal = query[0].transpose(0, 1), (-1, 0)
    output = varlen_attn(queries, keys, values, starts, starts, longest, longest, window_size=causal, scale=scale)
    return cast("Tensor", output)[None]


def _attend(
    module: nn.Module, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, **kwargs: object
) -> Tensor:
    # With one query per row, the heads that share a key head become its queries. transformers' function does the same,
    # but its checks take as long as attention itself in a short pass.
    unusual = module.training or any(kwargs.get(name) is not None for name in UNUSUAL)
    if query.shape[2] > 1 or mask is None or mask.shape[1] > 1 or unusual:
        return _sdpa(module, query, keys, values, mask, **kwargs)[0]
    rows, heads, _queries, size = query.shape
    grouped, scale = query.reshape(rows, keys.shape[1], -1, size), cast("float | None", kwargs.get("scaling"))
    output = nn.functional.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
    return output.reshape(rows, 1, heads, -1)


AttentionInterface.register(NAME, _attention)
AttentionInterface.register(PADDED, sdpa_attention_forward)


for _name in (NAME, PADDED):
    AttentionMaskInterface.register(_name, sdpa_mask)


def pass_overhead(device: torch.device) -> int:
    # Fitted to small models on a CPU, 29 to 60 for updates and 30 to 80 for forward passes; larger models compute more
    # per token, so it is lower. Elsewhere kernel launches cost more tokens; 1024 is an estimate.
    return 64 if device.type == "cpu" else 1024


def packed_row_on(device: torch.device) -> int:
    # Fitted to small models, at 2 to 6.
    return 6 if device.type == "cpu" else 0


def filled(sizes: Sequence[int], budget: float) -> Iterator[list[int]]:
    """Yield the indices of ``sizes`` in groups of at most ``budget`` in all, or of one size, the largest first."""
    group, size = list[int](), 0
    for at in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        if group and size + sizes[at] > budget:
            yield group
            group, size = [], 0
        group, size = [*group, at], size + sizes[at]
    if group:
        yield group


def cheapest_groups(
    lengths: Sequence[int],
    rows: Iterable[int],
    *,
    overhead: int,
    budget: float = math.inf,
    counts: Sequence[int] | None = None,
) -> list[list[int]]:
    """Return ``rows`` in the groups of least total cost: a group costs its padded tokens and ``overhead``."""
    # A group has neighbours by length, the longest first: a budget of padded tokens too large for the device then fails
    # at once. A longer row is a group of its own. counts: multiplicity of each of all rows.
    order = sorted(rows, key=lambda row: (-lengths[row], row))
    widths = np.array([lengths[row] for row in order], np.float64)
    before = np.cumsum([0, *(1 if counts is None else counts[row] for row in order)])
    costs = np.zeros(len(order) + 1)  # least cost of the first rows, by their number
    starts = [0] * (len(order) + 1)  # where the last group of that solution begins
    for end in range(1, len(order) + 1):
        sizes = (before[end] - before[:end]) * widths[:end]  # of the last group, by its first row
        sizes[:-1][sizes[:-1] > budget] = np.inf
        starts[end] = int(np.argmin(costs[:end] + sizes))
        costs[end] = costs[starts[end]] + sizes[starts[end]] + overhead
    groups, end = list[list[int]](), len(order)
    while end:
        groups.append(order[starts[end] : end])
        end = starts[end]
    return groups[::-1]
