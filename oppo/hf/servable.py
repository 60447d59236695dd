"""Whether and how a model can be served, probed at load: by its config and by its outputs.

::

    in pieces    while sequences grow: a policy, and scorers that read while it decodes
    whole        each sequence once, when it has ended: scorers and trained models
    refused      it is not causal, or padding behind a sequence changes its outputs
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import getclosurevars, unwrap
from types import FunctionType
from typing import Final, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from oppo.errors import ModelRefused
from oppo.hf.devices import full_precision
from oppo.hf.kv.attention import (
    AttentionKind,
    Choice,
    attend,
    attend_as_loaded,
    attending_as_loaded,
    kinds_of,
    window_of,
)
from oppo.hf.kv.reader import Incremental, WholeRows
from oppo.hf.model_parts import (
    FAILURES,
    backbone,
    cache_argument,
    has_experts,
    keeps_logits,
    longest,
    pads_of,
    set_only_whole,
    takes,
    vocabulary,
)
from oppo.hf.vision import pixels_of, taken_by
from oppo.log import logger

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

CLASSES = (16, 32, 64)  # length classes of the probe: short, so that rows soon outgrow them
TAIL = 48  # last tokens of the longest row, which are read in small pieces and compared; the others are one chunk
PAST_WINDOW = 40  # tokens by which the longest row exceeds the sliding window

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


NOTHING: Final[Mapping[str, Tensor]] = {}

Way: TypeAlias = AttentionKind | Literal["whole"]
"""How a model is served: in pieces, by a kind of attention, or each sequence whole."""


@full_precision()
def probe(model: PreTrainedModel, *, attention: Choice = "auto") -> Way:
    """Return how ``model`` agrees with its own one-shot forward pass; it is served so from now on.

    Rows are read beside one another and compared by logits or, for a model without a language model's head, by the last
    hidden states of its backbone. The longest row exceeds the sliding window, or has about 80 tokens without one. Of a
    mixture of experts the median position of each row must agree, in two-byte types within :data:`ROUTED_TOLERANCE`.

    Args:
        model: any model with a causal backbone.
        attention: the only kind to try; ``auto``: the fastest that agrees (:mod:`oppo.hf.kv.attention`), and whole
            sequences if none does.

    Raises:
        ModelRefused: names the model, and the difference found or the reason why it was not tried.
    """
    served = model if model.get_output_embeddings() is not None else backbone(model)
    limit = TOLERANCES.get(model.dtype, 1e-4)
    if has_experts(model) and model.dtype.itemsize == 2:
        limit = max(limit, ROUTED_TOLERANCE)
    set_only_whole(served.train(mode=False), None)
    with _refusing(f"{_name(served)} cannot be served"):
        if model.config.is_encoder_decoder:
            raise ModelRefused("it is an encoder-decoder; only decoders are served")
        _keep_exact_kernels(served, limit)
        _require_causal(served, limit)
    kinds = kinds_of(served) if attention == "auto" else (attention,)
    try:
        return _in_pieces(served, kinds, limit)
    except ModelRefused as refusal:
        if attention != "auto":
            raise
        reason = str(refusal)
    attend_as_loaded(served)
    with _refusing(f"{reason}; nor can it read whole sequences"):
        rows = _rows(served)
        outputs = WholeRows(served).extend(list(rows), list(rows.values()))
        for tokens, found in zip(rows.values(), outputs, strict=True):
            _require_same(served, tokens, [(0, found)], limit, "beside longer rows")
    set_only_whole(served, reason)
    return "whole"


def _keep_exact_kernels(model: PreTrainedModel, limit: float) -> None:
    # transformers takes functions of flash-linear-attention, causal-conv1d and mamba-ssm where these are installed.
    functions = [
        (module, name, unwrap(function))
        for module in {sys.modules[type(part).__module__] for part in model.modules()}
        for name, function in vars(module).items()
        if isinstance(function, FunctionType) and "is_new_implementation" in function.__code__.co_freevars
        if getclosurevars(function).nonlocals["is_new_implementation"]
    ]
    if not functions:
        return
    tokens, names = _rows(model)[LONG], ", ".join(sorted(name for _, name, _ in functions))
    try:
        found: Tensor | None = _one_shot(model, tokens, len(tokens))
    except FAILURES:  # of a kernel for another device
        found = None
    fast = [getattr(module, name) for module, name, _ in functions]
    for module, name, of_torch in functions:
        setattr(module, name, of_torch)
    difference = torch.inf if found is None else _difference(model, found, _one_shot(model, tokens, len(tokens)))[0]
    how = "fail" if found is None else f"differ from torch's by {difference:.1e} of the largest output"
    said = f"the kernels that are installed for {names} of {_name(model)} {how}"
    if difference <= limit:
        for (module, name, _), function in zip(functions, fast, strict=True):
            setattr(module, name, function)
        logger.once(said)
    else:
        logger.once(f"{said}; at most {limit:.0e} is allowed: torch's are used, which are slower")


def _in_pieces(model: PreTrainedModel, kinds: Sequence[AttentionKind], limit: float) -> AttentionKind:
    if reason := known_reason(model):
        raise ModelRefused(reason)
    for kind in kinds:
        try:
            attend(model, kind)
            with _refusing(f"{_name(model)} cannot be served row by row with attention {kind!r}"):
                _compare(model, limit)
        except ModelRefused as error:
            refusal = error
        else:
            return kind
    raise refusal


@contextmanager
def _refusing(message: str) -> Iterator[None]:
    try:
        with torch.inference_mode():
            yield
    except ModelRefused as error:
        raise ModelRefused(f"{message}: {error}") from error
    except FAILURES as error:
        raise ModelRefused(f"{message}: it failed when probed ({error!r})") from error


def _name(model: PreTrainedModel) -> str:
    return f"{type(model).__name__} (model type {model.config.model_type!r})"


def known_reason(model: PreTrainedModel) -> str | None:
    # As its parts say, without weights; None: try it.
    # Some faults show only in sequences that are longer than the probe's.
    text = model.config.get_text_config()
    alibi = (getattr(config, "alibi", False) for config in (text, getattr(text, "attn_config", None)))
    if text.model_type == "bloom" or any(alibi):
        reason = "its attention has ALiBi biases, which transformers derives from one length for all rows"
    elif "local" in getattr(text, "attention_layers", ()):
        reason = "its local layers apply their window by the column of a key, the same for all rows"
    elif any(hasattr(module, "A_log") and hasattr(module, "x_proj") for module in model.modules()):
        reason = "its recurrent layers (Mamba 1) begin each chunk of a sequence anew in transformers"
    elif cache_argument(model) is None:
        reason = "its forward pass takes no KV cache (cache or past_key_values), so it cannot continue a sequence"
    else:
        return None
    return f"{_name(model)} cannot be served row by row: {reason}"


def _compare(model: PreTrainedModel, limit: float) -> None:
    incremental, rows = Incremental(model, classes=CLASSES), _rows(model)
    read: dict[int, list[tuple[int, Tensor]]] = {row: [] for row in rows}
    first = incremental.extend([LONG], [rows[LONG][: max(len(rows[LONG]) - TAIL, 1)]], last=[1])[0]
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


@full_precision()
def probe_images(model: PreTrainedModel) -> None:
    served = model if model.get_output_embeddings() is not None else backbone(model)
    limit = TOLERANCES.get(model.dtype, 1e-4)
    if has_experts(model) and model.dtype.itemsize == 2:
        limit = max(limit, ROUTED_TOLERANCE)
    with _refusing(f"{_name(model)} cannot be shown images"):
        processor, pad = pixels_of(served), pads_of(served.config)[0]
        prompt, images = processor.trial()
        words = torch.arange(12) % min(8, pad)  # none stands for an image
        tokens = torch.cat([torch.from_numpy(prompt.astype(np.int64)), words])
        kinds = (tokens == pad).int()[None].to(served.device)
        named = [name for name in ("mm_token_type_ids", "token_type_ids") if takes(served, name)]
        given = {**taken_by(served, processor.pixels(images)), **dict.fromkeys(named, kinds)}
        reader, read = Incremental(served, classes=CLASSES), list[tuple[int, Tensor]]()
        reader.show(LONG, prompt, images)
        while (at := reader.length(LONG)) < len(tokens):
            read.append((at, reader.extend([LONG], [tokens[at : at + reader.cut(LONG, at, 7)]])[0]))
        _require_same(served, tokens.to(served.device), read, limit, "with an image, in pieces", given)


def _compare_after_padding(model: PreTrainedModel, limit: float) -> None:
    # The effect of padding on a state fades, so the median position hides it; the tokens right after padding show it.
    rows = {row: _tokens(model, row, 10 + 4 * row) for row in range(5)}
    together = Incremental(model, classes=CLASSES)
    together.extend(list(rows), [tokens[:8] for tokens in rows.values()])
    together.extend(list(rows), [tokens[8:-1] for tokens in rows.values()])
    after = together.step(list(rows), torch.stack([tokens[-1] for tokens in rows.values()]))
    alone = [Incremental(model, classes=CLASSES).extend([row], [tokens], last=[1])[0] for row, tokens in rows.items()]
    least = float(_relative(after, torch.cat(alone))[:-1].min())
    if not least <= limit:
        raise ModelRefused(
            "padding before a chunk changes the states of its recurrent layers, and its output after it by at least "
            f"{least:.1e} of the largest output; at most {limit:.0e} is allowed in {model.dtype}"
        )


def _require_same(  # noqa: PLR0917 - as many as are compared
    model: PreTrainedModel,
    tokens: Tensor,
    read: Sequence[tuple[int, Tensor]],
    limit: float,
    how: str = "in pieces",
    given: Mapping[str, Tensor] = NOTHING,
) -> None:
    # ``read`` has the outputs of one row, by the first position of each piece.
    base = min(start for start, _ in read)
    expected = _one_shot(model, tokens, len(tokens) - base, given)
    positions = torch.cat([torch.arange(start, start + len(outputs)) for start, outputs in read])
    found = torch.cat([outputs for _, outputs in read])
    difference, at = _difference(model, found, expected[positions - base])
    if not difference <= limit:
        raise ModelRefused(
            f"read {how}, its output at position {positions[at]} of {len(tokens)} differs from its own one-shot "
            f"forward pass by {difference:.1e} of the largest output there; at most {limit:.0e} is allowed in "
            f"{model.dtype}"
        )


def _require_causal(model: PreTrainedModel, limit: float) -> None:
    tokens = _rows(model)[MIDDLE]
    changed = tokens.clone()
    changed[-1] = (changed[-1] + 1) % 2
    expected = _one_shot(model, tokens, len(tokens))[:-1]
    limit = limit if has_experts(model) else limit * CAUSAL_SHARE
    difference, at = _difference(model, _one_shot(model, changed, len(tokens))[:-1], expected)
    if not difference <= limit:
        raise ModelRefused(
            f"it is not causal: another last token changed its output at position {at} of {len(tokens)} by "
            f"{difference:.1e} of the largest output there"
        )


def _difference(model: PreTrainedModel, found: Tensor, expected: Tensor) -> tuple[float, int]:
    # Relative to the position's largest output, and the index: of the worst position, with experts of the median one.
    relative = _relative(found, expected)
    difference, at = relative.median(0) if has_experts(model) else relative.max(0)
    return float(difference), int(at)


def _relative(found: Tensor, expected: Tensor) -> Tensor:
    scale = expected.float().abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    return ((found.float() - expected.float()).abs().amax(-1) / scale).nan_to_num(nan=torch.inf)


def _one_shot(model: PreTrainedModel, tokens: Tensor, keep: int, given: Mapping[str, Tensor] = NOTHING) -> Tensor:
    # [keep, D] at the last positions of one row, without a cache. given: further arguments, of images.
    kept = {"logits_to_keep": keep} if keeps_logits(model) else {}
    ids = tokens[None]
    with attending_as_loaded(model):
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **kept, **given)
    outputs: Tensor = output.logits if "logits" in output else output.last_hidden_state
    return outputs[0, -keep:]


def _rows(model: PreTrainedModel) -> dict[int, Tensor]:
    most = min(longest(model), max(80, (window_of(model.config) or 0) + PAST_WINDOW))
    return {row: _tokens(model, row, min(length, most)) for row, length in ((LONG, most), (MIDDLE, 41), (SHORT, 8))}


def _tokens(model: PreTrainedModel, row: int, length: int) -> Tensor:
    # int64 [length], spread over the vocabulary, the same in every run.
    return (torch.arange(length, device=model.device) * 7919 + row * 104729 + 3) % vocabulary(model)
