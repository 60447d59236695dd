"""The probe at load: models that cannot be served row by row are refused, by their config or by their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.introspection import backbone, cache_argument, has_experts, keeps_logits, vocabulary
from oppo.hf.kv.attention import AttentionKind, Choice, attend, attending_as_loaded, kinds_of, window_of
from oppo.hf.kv.reader import Incremental

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference at a position, in units of the largest output there; two-byte types hide small faults."""

ROUTED_TOLERANCE = 2e-2
"""The least tolerance for a mixture of experts in a two-byte type.

The median position of a mixture counts instead of the worst. Rounding decides near-ties of its router: of a healthy
8-layer model in bfloat16 up to a fifth of the positions differed by more than 6e-2, the median by less than 2e-2. A
wrong mask or a lost key shows at nearly all positions after it.
"""

CAUSAL_SHARE = 0.01
"""Share of the tolerance by which another last token may change earlier outputs.

A causal model's do not change by a bit, unless its kernels vary from run to run. A mixture of experts has the whole
tolerance: the other token changes how many tokens an expert computes together, and so their rounding.
"""

CLASSES = (16, 32, 64)
"""Length classes of the probe: short, so that rows soon outgrow them."""

TAIL = 48
"""Last tokens of the longest row, which are read in small pieces and compared; the others are one chunk."""

PAST_WINDOW = 40
"""Tokens by which the longest row exceeds the sliding window."""

LONG, MIDDLE, SHORT = 1, 2, 3
CALLS: tuple[tuple[str, dict[int, int]], ...] = (
    ("extend", {MIDDLE: 9}),
    ("extend", {SHORT: 5, LONG: 12}),
    ("step", {SHORT: 1, LONG: 1, MIDDLE: 1}),
    ("segmented step", {SHORT: 1, LONG: 1, MIDDLE: 1}),
    ("extend", {MIDDLE: 14, LONG: 9}),
    ("step", {MIDDLE: 1, SHORT: 1, LONG: 1}),
    ("forget", {SHORT: 0}),
    ("extend", {LONG: 24, MIDDLE: 15}),
    ("step", {MIDDLE: 1, LONG: 1}),
)
"""The probe's calls, with tokens by row: ragged chunks, steps, moves to longer classes, a row that leaves.

One step has a segment for each length, which such short rows never get otherwise.
"""


def probe(model: PreTrainedModel, *, tolerance: float | None = None, attention: Choice = "auto") -> AttentionKind:
    """Return the kind of attention by which ``model``, read in pieces, agrees with its own one-shot forward pass.

    The model attends so from now on. Rows are read beside one another and compared by logits or, for a model without a
    language model's head, by the last hidden states of its backbone. The longest row exceeds the sliding window, or has
    about 80 tokens without one. Of a mixture of experts the median position of each row must agree, in two-byte types
    within :data:`ROUTED_TOLERANCE`.

    Args:
        model: any model with a causal backbone.
        tolerance: replaces that of the model's dtype in :data:`TOLERANCES`.
        attention: the only kind to try; ``auto``: the fastest that agrees (:mod:`oppo.hf.kv.attention`).

    Raises:
        ModelRefused: names the model, and the difference found or the reason why it was not tried.
    """
    served = model if model.get_output_embeddings() is not None else backbone(model)
    reason = _known_reason(served)
    if reason is not None:
        raise ModelRefused(f"{_name(model)} cannot be served row by row: {reason}")
    limit = TOLERANCES.get(model.dtype, 1e-4) if tolerance is None else tolerance
    if has_experts(model) and tolerance is None and model.dtype.itemsize == 2:
        limit = max(limit, ROUTED_TOLERANCE)
    *faster, last = kinds_of(served) if attention == "auto" else (attention,)
    for kind in faster:
        with suppress(ModelRefused):
            _require_agreement(served, kind, limit)
            return kind
    _require_agreement(served, last, limit)
    return last


def _require_agreement(model: PreTrainedModel, kind: AttentionKind, limit: float) -> None:
    attend(model, kind)
    try:
        with torch.inference_mode():
            _compare(model, limit)
    except (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise ModelRefused(
            f"{_name(model)} cannot be served row by row with attention {kind!r}: it failed when probed ({error!r})"
            + (": choose 'auto' or 'padded'" if kind == "segmented" else "")
        ) from error


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (model type {model.config.model_type!r})"


def _known_reason(model: PreTrainedModel) -> str | None:
    # ``None``: the model is to be tried.
    text = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder; only decoders are served"
    alibi = (getattr(config, "alibi", False) for config in (text, getattr(text, "attn_config", None)))
    if text.model_type == "bloom" or any(alibi):
        return "its attention has ALiBi biases, which transformers derives from one length for all rows"
    if "local" in getattr(text, "attention_layers", ()):
        return "its local layers apply their window by the column of a key, the same for all rows"
    if any(hasattr(module, "A_log") and hasattr(module, "x_proj") for module in model.modules()):
        return "its recurrent layers (Mamba 1) begin each chunk of a sequence anew in transformers"
    if cache_argument(model) is None:
        return "its forward pass takes no KV cache (cache or past_key_values), so it cannot continue a sequence"
    return None


def _compare(model: PreTrainedModel, limit: float) -> None:
    incremental = Incremental(model, classes=CLASSES)
    longest = min(incremental.max_length, max(80, (window_of(model.config) or 0) + PAST_WINDOW))
    rows = {row: _tokens(model, row, length) for row, length in ((LONG, longest), (MIDDLE, 41), (SHORT, 8))}
    rows = {row: tokens[:longest] for row, tokens in rows.items()}
    _require_causal(model, rows[MIDDLE], limit)
    read: dict[int, list[tuple[int, Tensor]]] = {row: [] for row in rows}
    first = incremental.extend([LONG], [rows[LONG][: max(longest - TAIL, 1)]], last=[1])[0]
    read[LONG].append((incremental.length(LONG) - 1, first))
    for call, amounts in CALLS:
        if call == "forget":
            incremental.forget(list(amounts))
            continue
        starts = {row: incremental.length(row) for row in amounts}
        pieces = {row: rows[row][start : start + amounts[row]] for row, start in starts.items()}
        pieces = {row: piece for row, piece in pieces.items() if len(piece)}
        if not pieces:
            continue
        if call == "extend":
            outputs = incremental.extend(list(pieces), list(pieces.values()))
        else:
            if call == "segmented step":
                incremental.segment_by_length(list(pieces))
            outputs = list(incremental.step(list(pieces), torch.cat(list(pieces.values())))[:, None])
        for row, output in zip(pieces, outputs, strict=True):
            read[row].append((starts[row], output))
    for row, tokens in rows.items():
        _require_same(model, tokens, read[row], limit)
    if incremental.has_states and has_experts(model):
        _compare_after_padding(model, limit)


def _compare_after_padding(model: PreTrainedModel, limit: float) -> None:
    # What padding adds to a state fades, so that the median position hides it. It is in all tokens right after padding.
    rows = {row: _tokens(model, row, 10 + 4 * row) for row in range(5)}
    together = Incremental(model, classes=CLASSES)
    together.extend(list(rows), [tokens[:8] for tokens in rows.values()])
    together.extend(list(rows), [tokens[8:-1] for tokens in rows.values()])
    after = together.step(list(rows), torch.stack([tokens[-1] for tokens in rows.values()]))
    alone = [Incremental(model, classes=CLASSES).extend([row], [tokens], last=[1])[0] for row, tokens in rows.items()]
    least = float(_relative(after, torch.cat(alone))[:-1].min())
    if not least <= limit:
        raise ModelRefused(
            f"{_name(model)} cannot be served row by row: padding before a chunk changes the states of its recurrent "
            f"layers, and its output after it by at least {least:.1e} of the largest output; at most {limit:.0e} is "
            f"allowed in {model.dtype}"
        )


def _require_same(model: PreTrainedModel, tokens: Tensor, read: Sequence[tuple[int, Tensor]], limit: float) -> None:
    # ``read`` has the outputs of one row, by the first position of each piece.
    base = max(len(tokens) - TAIL - 1, 0)
    expected = _one_shot(model, tokens, len(tokens) - base)
    positions = torch.cat([torch.arange(start, start + len(outputs)) for start, outputs in read])
    found = torch.cat([outputs for _, outputs in read])
    difference, at = _difference(model, found, expected[positions - base])
    if not difference <= limit:
        raise ModelRefused(
            f"{_name(model)} cannot be served row by row: read in pieces, its output at position {positions[at]} of "
            f"{len(tokens)} differs from its own one-shot forward pass by {difference:.1e} of the largest output "
            f"there; at most {limit:.0e} is allowed in {model.dtype}"
        )


def _require_causal(model: PreTrainedModel, tokens: Tensor, limit: float) -> None:
    changed = tokens.clone()
    changed[-1] = (changed[-1] + 1) % 2
    expected = _one_shot(model, tokens, len(tokens))[:-1]
    limit = limit if has_experts(model) else limit * CAUSAL_SHARE
    difference, at = _difference(model, _one_shot(model, changed, len(tokens))[:-1], expected)
    if not difference <= limit:
        raise ModelRefused(
            f"{_name(model)} cannot be served row by row: it is not causal: another last token changed its output at "
            f"position {at} of {len(tokens)} by {difference:.1e} of the largest output there"
        )


def _difference(model: PreTrainedModel, found: Tensor, expected: Tensor) -> tuple[float, int]:
    # Relative to the position's largest output, and the index: of the worst position, with experts of the median one.
    relative = _relative(found, expected)
    difference, at = relative.median(0) if has_experts(model) else relative.max(0)
    return float(difference), int(at)


def _relative(found: Tensor, expected: Tensor) -> Tensor:
    scale = expected.float().abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((found.float() - expected.float()).abs().amax(-1) / scale).nan_to_num(nan=torch.inf)


def _one_shot(model: PreTrainedModel, tokens: Tensor, keep: int) -> Tensor:
    # [keep, D] at the last positions of one row, without a cache.
    kept = {"logits_to_keep": keep} if keeps_logits(model) else {}
    ids = tokens[None]
    with attending_as_loaded(model):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **kept)
    outputs: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return outputs[0, -keep:]


def _tokens(model: PreTrainedModel, row: int, length: int) -> Tensor:
    # int64 [length], spread over the vocabulary, the same in every run.
    return (torch.arange(length, device=model.device) * 7919 + row * 104729 + 3) % vocabulary(model)
