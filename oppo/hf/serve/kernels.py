"""Drawing tokens in two launches: noise, mask, argmax and normaliser in one pass over the logits, then over its parts.

The noise of a token, and so the token itself, has the bits that :func:`oppo.hf.serve.sampling.draw` gives on a CPU; its
log-prob is the same but for rounding, since its sums have another order. In Triton, which comes with PyTorch for CUDA.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

from oppo.hf.serve.noise import CELLS, GOLDEN32, MIX32, WITHIN

BLOCK: Final = 2048  # columns of the logits that one program reads

_GOLDEN: Final = tl.constexpr(GOLDEN32)
_FIRST, _SECOND = (tl.constexpr(each) for each in MIX32)
_WITHIN: Final = tl.constexpr(WITHIN)
_LAST_BITS: Final = tl.constexpr((1 << WITHIN) - 1)
_CELLS: Final = tl.constexpr(CELLS)


def draw(
    logits: Tensor, keys: Tensor, table: Tensor, *, temperature: float, ends: Tensor, least: int
) -> tuple[Tensor, Tensor]:
    """Return a token of each row, int64 [n], and its log-prob, float32 [n].

    Args:
        logits: float [n, V], adjacent in each row.
        keys: of the rows' noise, int32 [n, 3].
        table: :func:`oppo.hf.serve.noise.table_on`.
        temperature: divides the logits; 0 is greedy.
        ends: ids, int32 [m], that no row draws whose position is below ``least``.
    """
    rows, vocabulary = logits.shape
    parts = triton.cdiv(vocabulary, BLOCK)
    found = torch.empty(rows, parts, 5, device=logits.device)
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, device=logits.device)
    with torch.cuda.device_of(logits):
        _draw_parts[(rows, parts)](
            *(found, logits, keys, table, ends, logits.stride(0), vocabulary, temperature or 1.0, least),
            barred=len(ends),
            sampled=temperature > 0,
            block=BLOCK,
            enable_fp_fusion=False,
        )
        _join_parts[(rows,)](tokens, logprobs, found, parts, width=triton.next_power_of_2(parts))
    return tokens, logprobs


@triton.jit
def _noise_of(row, columns, keys, table):
    word = columns.to(tl.uint32) * _GOLDEN ^ tl.load(keys + row * 3).to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 16)) * _FIRST
    word += tl.load(keys + row * 3 + 1).to(tl.uint32, bitcast=True)
    word = (word ^ (word >> 15)) * _SECOND
    word = (word ^ (word >> 16)) << 1
    number = word.to(tl.int32, bitcast=True).to(tl.float32) + 1.0
    bits = number.to(tl.uint32, bitcast=True)
    cell = (bits >> _WITHIN).to(tl.int32)
    within = (bits & _LAST_BITS).to(tl.int32).to(tl.float32)
    return within * tl.load(table + _CELLS + cell) + tl.load(table + cell)


@triton.jit
def _draw_parts(  # noqa: PLR0917 - a kernel's
    found,
    logits,
    keys,
    table,
    ends,
    stride,
    vocabulary,
    temperature,
    least,
    barred: tl.constexpr,
    sampled: tl.constexpr,
    block: tl.constexpr,
):
    # Of each part of a row: its best perturbed logit, the logit of that token, the largest logit, the sum of
    # exponentials relative to it, and the token. Of equal ones the first is best.
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = part * block + tl.arange(0, block)
    scaled = tl.load(logits + row * stride + columns, mask=columns < vocabulary, other=-float("inf")).to(tl.float32)
    if sampled:
        scaled = tl.div_rn(scaled, temperature)
    if barred:
        short = tl.load(keys + row * 3 + 2) < least
        for at in tl.static_range(barred):
            scaled = tl.where(short & (columns == tl.load(ends + at)), -float("inf"), scaled)
    score = scaled
    if sampled:
        score += _noise_of(row, columns, keys, table)
    best = tl.max(score, 0)
    token = tl.min(tl.where(score == best, columns, vocabulary - 1), 0)
    largest = tl.max(scaled, 0)
    largest = tl.where(largest == -float("inf"), 0.0, largest)
    found += (row * tl.num_programs(1) + part) * 5
    tl.store(found, best)
    tl.store(found + 1, tl.sum(tl.where(columns == token, scaled, 0.0), 0))
    tl.store(found + 2, largest)
    tl.store(found + 3, tl.sum(tl.exp(scaled - largest), 0))
    tl.store(found + 4, token.to(tl.float32))  # exact below 2**24


@triton.jit
def _join_parts(tokens, logprobs, found, parts, width: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, width)
    found += row * parts * 5
    there, at = part < parts, part * 5
    best = tl.load(found + at, mask=there, other=-float("inf"))
    largest = tl.load(found + at + 2, mask=there, other=-float("inf"))
    sums = tl.load(found + at + 3, mask=there, other=0.0)
    first = tl.min(tl.where(there & (best == tl.max(best, 0)), part, parts - 1), 0)
    top = tl.max(largest, 0)
    normaliser = top + tl.log(tl.sum(tl.where(there, sums * tl.exp(largest - top), 0.0), 0))
    logprob = tl.load(found + first * 5 + 1) - normaliser
    tl.store(logprobs + row, tl.where(logprob > 0, 0.0, logprob))  # a minimum could lose what is no number
    tl.store(tokens + row, tl.load(found + first * 5 + 4).to(tl.int64))
