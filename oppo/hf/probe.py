"""Refusing, at load, a model that cannot be served row by row: first by what it is, then by what it computes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.introspection import backbone, keeps_logits, routed, vocabulary
from oppo.hf.kv.attention import AttentionKind, Choice, attend, kinds_of
from oppo.hf.kv.incremental import Incremental
from oppo.hf.kv.masks import window_of

TOLERANCES = {torch.float64: 1e-4, torch.float32: 1e-4, torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference allowed at a position, in units of the largest output there; two-byte types hide small faults."""

ROUTED_TOLERANCE = 2e-2
"""The least tolerance for a mixture of experts, of which the median position counts instead of the worst.

Its router jumps where two experts nearly tie, and then rounding decides: of a healthy 8-layer model in bfloat16 up to
a fifth of the positions differed by more than 6e-2, the median by less than 2e-2; a wrong mask or a lost key shows at
nearly all positions after it.
"""

UNMOVED = 0.01
"""Share of the tolerance by which another last token may change earlier outputs.

Those of a causal model do not move by a bit, unless the kernels vary from run to run; among experts, it may change
with how many other tokens one is computed, and so its rounding.
"""

CLASSES = (16, 32, 64)
"""Length classes of the probe: short, so that rows soon move from one to the next."""

TAIL = 48
"""So many last tokens of the longest row are read in small pieces and compared; what precedes is one chunk."""

PAST_WINDOW = 40
"""The longest row exceeds the sliding window by so many tokens."""

LONG, MIDDLE, SHORT = 1, 2, 3
READING: tuple[tuple[str, dict[int, int]], ...] = (
    ("extend", {MIDDLE: 9}),
    ("extend", {SHORT: 5, LONG: 12}),
    ("step", {SHORT: 1, LONG: 1, MIDDLE: 1}),
    ("apart", {SHORT: 1, LONG: 1, MIDDLE: 1}),
    ("extend", {MIDDLE: 14, LONG: 9}),
    ("step", {MIDDLE: 1, SHORT: 1, LONG: 1}),
    ("forget", {SHORT: 0}),
    ("extend", {LONG: 24, MIDDLE: 15}),
    ("step", {MIDDLE: 1, LONG: 1}),
)
"""How the rows are read: ragged chunks, steps between them, moves to longer classes, a row that leaves.

One step is in parts, which rows as short as these would otherwise never be.
"""


def probe(model: PreTrainedModel, *, tolerance: float | None = None, attention: Choice = "auto") -> AttentionKind:
    """Return the kind of attention that serves ``model`` as its own one-shot forward pass would.

    What is compared is read in pieces, beside other rows. The model attends so from now on. A causal LM is compared by
    its logits, any other model by the last hidden states of its backbone. The longest row exceeds the sliding window,
    if there is one, and is about 80 tokens long otherwise.

    Of a mixture of experts the median position of each row must agree, within :data:`ROUTED_TOLERANCE` at least.

    Args:
        model: any model with a causal backbone.
        tolerance: instead of the one for the model's dtype in :data:`TOLERANCES`.
        attention: the only kind to be tried; ``auto``: the fastest with which it agrees (:mod:`oppo.hf.kv.attention`).

    Raises:
        ModelRefused: names the model, what was compared and by how much it differs, or why it was not tried.
    """
    served = model if model.get_output_embeddings() is not None else backbone(model)
    reason = _known_reason(served)
    if reason is not None:
        raise ModelRefused(f"{_name(model)} cannot be served row by row: {reason}")
    limit = TOLERANCES.get(model.dtype, 1e-4) if tolerance is None else tolerance
    if routed(model) and tolerance is None:
        limit = max(limit, ROUTED_TOLERANCE)
    *faster, last = kinds_of(served) if attention == "auto" else (attention,)
    for kind in faster:
        with suppress(ModelRefused):
            _try(served, kind, limit)
            return kind
    _try(served, last, limit)
    return last


def _try(model: PreTrainedModel, kind: AttentionKind, limit: float) -> None:
    """Return only if ``model`` agrees with itself by this kind of attention.

    Raises:
        ModelRefused: it does not, or it cannot attend so.
    """
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
    """Return why a model of this kind is not even tried, or ``None``."""
    text = model.config.get_text_config()
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder; only decoders are served"
    if text.model_type == "bloom" or getattr(text, "alibi", False) or _mpt_alibi(text):
        return "its attention has ALiBi biases, which transformers derives from one length for all rows"
    if "local" in getattr(text, "attention_layers", ()):
        return "its local layers apply their window by the column of a key, the same for all rows"
    if getattr(model, "_is_stateful", False):
        return "it has recurrent layers, whose state holds no position to go back to"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        return "its forward pass takes no past_key_values, so it cannot continue a sequence"
    return None


def _mpt_alibi(config: object) -> bool:
    return bool(getattr(getattr(config, "attn_config", None), "alibi", False))


def _compare(model: PreTrainedModel, limit: float) -> None:
    incremental = Incremental(model, classes=CLASSES)
    longest = min(incremental.max_length, max(80, (window_of(model.config) or 0) + PAST_WINDOW))
    rows = {row: _tokens(model, row, length) for row, length in ((LONG, longest), (MIDDLE, 41), (SHORT, 8))}
    rows = {row: tokens[:longest] for row, tokens in rows.items()}
    _causal(model, rows[MIDDLE], limit)
    read: dict[int, list[tuple[int, Tensor]]] = {row: [] for row in rows}
    first = incremental.extend([LONG], [rows[LONG][: max(longest - TAIL, 1)]], last=[1])[0]
    read[LONG].append((incremental.length(LONG) - 1, first))
    for kind, amounts in READING:
        if kind == "forget":
            incremental.forget(list(amounts))
            continue
        starts = {row: incremental.length(row) for row in amounts}
        pieces = {row: rows[row][start : start + amounts[row]] for row, start in starts.items()}
        pieces = {row: piece for row, piece in pieces.items() if len(piece)}
        if not pieces:
            continue
        if kind == "extend":
            outputs = incremental.extend(list(pieces), list(pieces.values()))
        else:
            if kind == "apart":
                incremental.stand_apart(list(pieces))
            outputs = list(incremental.step(list(pieces), torch.cat(list(pieces.values())))[:, None])
        for row, output in zip(pieces, outputs, strict=True):
            read[row].append((starts[row], output))
    for row, tokens in rows.items():
        _agree(model, tokens, read[row], limit)


def _agree(model: PreTrainedModel, tokens: Tensor, read: Sequence[tuple[int, Tensor]], limit: float) -> None:
    """Compare what was read of one row with the model's own pass over all of it."""
    base = max(len(tokens) - TAIL - 1, 0)
    want = _one_shot(model, tokens, len(tokens) - base)
    positions = torch.cat([torch.arange(start, start + len(got)) for start, got in read])
    difference, at = _difference(model, torch.cat([got for _, got in read]), want[positions - base])
    if not difference <= limit:
        raise ModelRefused(
            f"{_name(model)} cannot be served row by row: read in pieces, its output at position {positions[at]} of "
            f"{len(tokens)} differs from its own one-shot forward pass by {difference:.1e} of the largest output "
            f"there; at most {limit:.0e} is allowed in {model.dtype}"
        )


def _causal(model: PreTrainedModel, tokens: Tensor, limit: float) -> None:
    """Check that no output depends on a later token."""
    changed = tokens.clone()
    changed[-1] = (changed[-1] + 1) % 2
    before = _one_shot(model, tokens, len(tokens))[:-1]
    limit = limit if routed(model) else limit * UNMOVED
    difference, at = _difference(model, _one_shot(model, changed, len(tokens))[:-1], before)
    if not difference <= limit:
        raise ModelRefused(
            f"{_name(model)} cannot be served row by row: it is not causal: another last token changed its output at "
            f"position {at} of {len(tokens)} by {difference:.1e} of the largest output there"
        )


def _difference(model: PreTrainedModel, got: Tensor, want: Tensor) -> tuple[float, int]:
    """Return the worst difference over the positions (the median where experts are routed to), and where.

    A difference is relative to the largest output at its position.
    """
    scale = want.float().abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    relative = ((got.float() - want.float()).abs().amax(-1) / scale).nan_to_num(nan=torch.inf)
    difference, at = relative.median(0) if routed(model) else relative.max(0)
    return float(difference), int(at)


def _one_shot(model: PreTrainedModel, tokens: Tensor, keep: int) -> Tensor:
    """Return the outputs [keep, D] at the last positions of one row, as the model itself computes them."""
    kept = {"logits_to_keep": keep} if keeps_logits(model) else {}
    ids = tokens[None]
    output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **kept)
    seen: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return seen[0, -keep:]


def _tokens(model: PreTrainedModel, row: int, length: int) -> Tensor:
    """Return int64 [length]: token ids spread over the vocabulary, the same every time."""
    return (torch.arange(length, device=model.device) * 7919 + row * 104729 + 3) % vocabulary(model)
