"""Drawing tokens: noise that depends on nothing but the place of a token, and the Gumbel-argmax of logits plus noise.

``argmax(logits + g)`` with independent standard Gumbel ``g`` is a sample from ``softmax(logits)`` (Gumbel, 1954;
Maddison et al., 2014, "A* sampling"). Unlike inverting a cumulative sum it is robust: an error of 1e-6 in one logit
changes the token only where the two best perturbed logits nearly tie, so the same noise gives the same tokens under
another batch shape, chunking or device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from oppo.models import Sampling


def _signed(word: int, bits: int) -> int:
    """Return the unsigned ``word`` as the signed integer with the same bits."""
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


_GOLDEN64 = _signed(0x9E3779B97F4A7C15, 64)
_MIX64 = (_signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64))
_GOLDEN32 = _signed(0x9E3779B1, 32)
_NUCLEUS = 1024
"""The nucleus of ``top_p`` is looked for among this many tokens first: sorting a whole vocabulary is slow."""
_MIX32 = (_signed(0x7FEB352D, 32), _signed(0x846CA68B, 32))


def gumbel(seed: int, admission: Tensor, sample: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Return standard Gumbel noise, float32 [n, vocabulary], that depends only on the arguments of its row.

    Integer arithmetic up to the last two logarithms: the 31 random bits of an entry are the same on every device.

    Args:
        seed: any integer; its low 64 bits count.
        admission, sample, position: int64 [n], the place of the token to be drawn.
        vocabulary: entries per row; a longer row begins with the shorter one.
    """
    key = torch.full_like(admission, _signed(seed, 64))
    for word in (admission, sample, position):
        key = _splitmix64(key) ^ word
    key = _splitmix64(key)
    low, high = _signed_halves(key)
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=key.device) * _GOLDEN32
    bits = _hash32(tokens.unsqueeze(0) ^ low.unsqueeze(1), high.unsqueeze(1))
    # u in (0, 1) is finest near 0, so g = -log(-log(1 - u)) is finest in its upper tail, which decides an argmax.
    uniform = bits.to(torch.float32).add_(0.5).mul_(2.0**-31).clamp_(max=1 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def draw(
    logits: Tensor, noise: Tensor | None, sampling: Sampling, young: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the tokens, int64 [n], drawn from ``logits`` with ``noise``, and their log-probs, float32 [n].

    The log-prob is that of the whole distribution at the sampling temperature (1 when greedy), which a trainer
    computes again from the tokens alone. So with ``top_k`` or ``top_p``, and in ``young`` rows, the tokens come from a
    truncated, renormalised distribution, but the log-probs do not: they are too low by the logarithm of the mass that
    was kept.

    Args:
        logits: [n, V], of any floating type; the arithmetic is float32.
        noise: float32 [n, V], standard Gumbel; ``None`` only when the temperature is 0.
        sampling: temperature, then ``top_k``, then ``top_p``, as in transformers' ``generate``.
        young: bool [n], the rows that must not end yet: none of ``sampling.stop`` is drawn; ``None``: no row.

    Raises:
        ValueError: the temperature is above 0 and there is no noise.
    """
    logits = logits.float()
    if sampling.temperature > 0:
        logits = logits / sampling.temperature
    allowed = logits if young is None else _unending(logits, young, sampling.stop)
    if sampling.temperature == 0:
        tokens = allowed.argmax(-1)
    elif noise is None:
        raise ValueError(f"sampling at temperature {sampling.temperature} needs noise; only greedy decoding has none")
    else:
        tokens = _perturbed_argmax(allowed, noise, sampling)
    chosen = logits.gather(1, tokens.unsqueeze(1)).squeeze(1)
    return tokens, (chosen - logits.logsumexp(-1)).clamp_(max=0)  # rounding can leave it above 0


def _unending(logits: Tensor, young: Tensor, stop: Sequence[int]) -> Tensor:
    """Return ``logits``, those of stop tokens at minus infinity in the rows that must not end yet."""
    ends = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    ends[[token for token in stop if token < logits.shape[-1]]] = True
    return logits.masked_fill(young.unsqueeze(1) & ends, -torch.inf)


def _perturbed_argmax(logits: Tensor, noise: Tensor, sampling: Sampling) -> Tensor:
    if not sampling.top_k and sampling.top_p == 1:
        return (logits + noise).argmax(-1)
    kept, ids = _nucleus(logits, sampling.top_p) if not sampling.top_k else _most_likely(logits, sampling)
    choice = (kept + noise.gather(1, ids)).argmax(-1, keepdim=True)
    return ids.gather(1, choice).squeeze(1)


def _most_likely(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the ``top_k`` best logits of each row, those outside of ``top_p`` at minus infinity, and their ids."""
    kept, ids = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1)
    return _until(kept, kept.softmax(-1), sampling.top_p), ids


def _nucleus(logits: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return the best logits of each row, those outside of ``top_p`` at minus infinity, and their ids."""
    vocabulary, total = logits.shape[-1], logits.logsumexp(-1, keepdim=True)
    width = min(_NUCLEUS, vocabulary)
    kept, ids = logits.topk(width, dim=-1)
    if width < vocabulary and bool(((kept - total).exp().sum(-1) < top_p).any()):
        kept, ids = logits.sort(-1, descending=True)
    return _until(kept, (kept - total).exp(), top_p), ids


def _until(kept: Tensor, probabilities: Tensor, top_p: float) -> Tensor:
    """Return ``kept``, sorted from the best, at minus infinity where better ones already have ``top_p`` of the mass."""
    if top_p == 1:
        return kept
    return kept.masked_fill(probabilities.cumsum(-1) - probabilities >= top_p, -torch.inf)


def _shifted(word: Tensor, by: int, bits: int) -> Tensor:
    """Return ``word >>> by``: torch's shift of a signed integer copies the sign instead."""
    return (word >> by).bitwise_and_((1 << (bits - by)) - 1)


def _splitmix64(state: Tensor) -> Tensor:
    """Return the output of SplitMix64 (Steele, Lea, Flood, 2014) for each int64 state."""
    word = state + _GOLDEN64
    word = (word ^ _shifted(word, 30, 64)) * _MIX64[0]
    word = (word ^ _shifted(word, 27, 64)) * _MIX64[1]
    return word ^ _shifted(word, 31, 64)


def _signed_halves(word: Tensor) -> tuple[Tensor, Tensor]:
    """Return the low and the high half of int64 words, as int32."""
    low = (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
    return low.to(torch.int32), (word >> 32).to(torch.int32)


def _hash32(word: Tensor, key: Tensor) -> Tensor:
    """Return 31 random bits for each int32 word, which it overwrites: lowbias32 (Wellons, 2018), keyed half-way."""
    word ^= _shifted(word, 16, 32)
    word *= _MIX32[0]
    word += key
    word ^= _shifted(word, 15, 32)
    word *= _MIX32[1]
    word ^= _shifted(word, 16, 32)
    return word.bitwise_and_(0x7FFFFFFF)
