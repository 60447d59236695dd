"""What is computed of logits in few passes, in Triton, which comes with PyTorch for CUDA.

:func:`draw` draws tokens in two launches: noise, mask, argmax and normaliser in one pass over the logits, then over its
parts. The noise of a token, and so the token itself, has the bits that :func:`oppo.hf.serve.sampling.draw` gives on a
CPU. :func:`measured` reads log-probs and entropies in one pass, and their gradient in one more. Numbers are a CPU's but
for rounding, since sums have another order: of :func:`measured` within 2e-6 of the largest logit.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from oppo.hf.serve.noise import CELLS, GOLDEN32, MIX32, WITHIN

BLOCK: Final = 2048  # columns of the logits that one program reads
WIDE_BLOCK: Final = 8192  # columns that a program of a whole row holds at once
_WARPS: Final = 16
_LOWEST: Final = tl.constexpr(-3.0e38)

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


def measured(
    logits: Tensor, tokens: Tensor, *, vocabulary: int, temperature: float, barred: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the log-prob of each token and the entropy of the distribution that it is of: float32 [T], nats.

    Args:
        logits: float [T, V].
        tokens: int64 [T].
        vocabulary: the ids below it have a probability.
        temperature: divides the logits; 0 counts as 1.
        barred: ids that have none at some tokens: where the ids of each token begin in this very tensor, where the last
            token's end, and the ids, int32 [T + 1 + n].
    """
    numbers = vocabulary, temperature or 1.0
    found: tuple[Tensor, Tensor] = _Measured.apply(logits.contiguous(), tokens, numbers, barred)
    return found


class _Measured(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, tokens: Tensor, numbers: tuple[int, float], barred: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, normalisers = (torch.empty(len(logits), device=logits.device) for _ in range(3))
        barred_at = tokens if barred is None else barred
        with torch.cuda.device_of(logits):
            _measure[(len(logits),)](
                *(logprobs, entropies, normalisers, logits, tokens, barred_at),
                *(logits.stride(0), *numbers),
                bars=barred is not None,
                block=WIDE_BLOCK,
                num_warps=_WARPS,
            )
        ctx.save_for_backward(logits, tokens, barred_at, entropies, normalisers)
        ctx.numbers, ctx.bars = numbers, barred is not None
        return logprobs, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_logprobs: Tensor, of_entropies: Tensor) -> tuple[Tensor | None, ...]:
        logits, tokens, barred, entropies, normalisers = ctx.saved_tensors
        (rows, width), found = logits.shape, torch.empty_like(logits)
        with torch.cuda.device_of(logits):
            _differentiate[(rows, triton.cdiv(width, WIDE_BLOCK))](
                *(found, logits, tokens, barred, entropies, normalisers),
                *(of_logprobs.contiguous(), of_entropies.contiguous(), width, *ctx.numbers),
                bars=ctx.bars,
                block=WIDE_BLOCK,
                num_warps=_WARPS,
            )
        return found, None, None, None


@triton.jit
def _scaled(logits, row, columns, barred, vocabulary, temperature, bars: tl.constexpr):  # noqa: PLR0917 - a kernel's
    scaled = tl.load(logits + columns, mask=columns < vocabulary, other=-float("inf")).to(tl.float32)
    scaled = tl.div_rn(scaled, temperature)
    if bars:
        for at in range(tl.load(barred + row), tl.load(barred + row + 1)):
            scaled = tl.where(columns == tl.load(barred + at), -float("inf"), scaled)
    return scaled


@triton.jit
def _measure(  # noqa: PLR0917 - a kernel's
    logprobs,
    entropies,
    normalisers,
    logits,
    tokens,
    barred,
    stride,
    vocabulary,
    temperature,
    bars: tl.constexpr,
    block: tl.constexpr,
):
    # Of every block-th column: the largest logit, and relative to it the sums of exponentials e and of e times logit.
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    largest = tl.full([block], _LOWEST, tl.float32)
    total = tl.zeros([block], tl.float32)
    energy = tl.zeros([block], tl.float32)
    for start in range(0, vocabulary, block):
        scaled = _scaled(logits, row, start + tl.arange(0, block), barred, vocabulary, temperature, bars)
        larger = tl.maximum(largest, scaled)
        rise, above = largest - larger, scaled - larger
        added, kept = tl.exp(above), tl.exp(rise)
        energy = (energy + rise * total) * kept + tl.where(scaled == -float("inf"), 0.0, added * above)
        total = total * kept + added
        largest = larger
    top = tl.max(largest, 0)
    rise = largest - top
    kept = tl.exp(rise)
    energy = tl.sum((energy + rise * total) * kept, 0)
    total = tl.sum(total * kept, 0)
    drawn = tl.div_rn(tl.load(logits + tl.load(tokens + row)).to(tl.float32), temperature)
    tl.store(logprobs + row, drawn - top - tl.log(total))
    tl.store(entropies + row, tl.log(total) - energy / total)
    tl.store(normalisers + row, top + tl.log(total))


@triton.jit
def _differentiate(  # noqa: PLR0917 - a kernel's
    found,
    logits,
    tokens,
    barred,
    entropies,
    normalisers,
    of_logprobs,
    of_entropies,
    width,
    vocabulary,
    temperature,
    bars: tl.constexpr,
    block: tl.constexpr,
):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * block + tl.arange(0, block)
    scaled = _scaled(logits + row * width, row, columns, barred, vocabulary, temperature, bars)
    logprob = scaled - tl.load(normalisers + row)
    probability = tl.exp(logprob)
    slope = tl.load(of_logprobs + row) * (tl.where(columns == tl.load(tokens + row), 1.0, 0.0) - probability)
    surprise = tl.where(scaled == -float("inf"), 0.0, probability * (logprob + tl.load(entropies + row)))
    slope -= tl.load(of_entropies + row) * surprise
    tl.store(found + row * width + columns, tl.div_rn(slope, temperature), mask=columns < width)
