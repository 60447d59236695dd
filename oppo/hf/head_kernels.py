"""Log-probs and entropies of tokens in one pass over their logits, and the gradient of both in one more.

As :func:`oppo.losses.token_logprobs` and :func:`oppo.losses.entropies` give them but for rounding, since sums have
another order: within 2e-6 of the largest logit. In Triton, which comes with PyTorch for CUDA.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK: Final = 8192  # columns of the logits that a program holds at once
_WARPS: Final = 16
_LOWEST: Final = tl.constexpr(-3.0e38)


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
    found: tuple[Tensor, Tensor] = _Measured.apply(
        logits.contiguous(), tokens, (vocabulary, temperature or 1.0), barred
    )  # type: ignore[no-untyped-call] # torch's
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
                block=BLOCK,
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
            _differentiate[(rows, triton.cdiv(width, BLOCK))](
                *(found, logits, tokens, barred, entropies, normalisers),
                *(of_logprobs.contiguous(), of_entropies.contiguous(), width, *ctx.numbers),
                bars=ctx.bars,
                block=BLOCK,
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
