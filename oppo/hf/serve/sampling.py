"""Drawing tokens: noise that depends on nothing but the place of a token, and the Gumbel-argmax of logits plus noise.

``argmax(logits + g)`` with independent standard Gumbel ``g`` is a sample from ``softmax(logits)`` (Gumbel, 1954;
Maddison et al., 2014, "A* sampling"). Unlike inverting a cumulative sum it is robust: an error of 1e-6 in one logit
changes the token only where the two best perturbed logits nearly tie, so the same noise gives the same tokens under
another batch shape, chunking or device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

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


class DeviceSupport(NamedTuple):
    """What tokens were drawn from, as an :class:`oppo.support.Support` has it, but where their logits are.

    Attributes:
        ids: int32 [S].
        counts: int32 [n], above 0: one of exactly so many ids; below 0: any but so many; 0: any.
    """

    ids: Tensor
    counts: Tensor


class Drawn(NamedTuple):
    """Tokens, int64 [n], their log-probs, float32 [n], and their support: ``None`` where nothing was left out."""

    tokens: Tensor
    logprobs: Tensor
    support: DeviceSupport | None


class _Kept(NamedTuple):
    """The best logits of each row, from the best, float32 [n, k]; minus infinity outside of what was kept.

    Attributes:
        ids: int64 [n, k].
        normaliser: float32 [n, 1], the logsumexp of what was kept.
    """

    logits: Tensor
    ids: Tensor
    normaliser: Tensor

    def support(self) -> DeviceSupport:
        kept = self.logits > -torch.inf
        return DeviceSupport(self.ids[kept].int(), kept.sum(-1, dtype=torch.int32))


def draw(logits: Tensor, noise: Tensor | None, sampling: Sampling, young: Tensor | None = None) -> Drawn:
    """Return the tokens drawn from ``logits`` with ``noise``, with their log-probs.

    A log-prob is that of the distribution that the token was drawn from: at the sampling temperature (1 when greedy),
    truncated and renormalised.

    Args:
        logits: [n, V], of any floating type; the arithmetic is float32.
        noise: float32 [n, V], standard Gumbel; ``None`` only when the temperature is 0.
        sampling: temperature, then ``top_k``, then ``top_p``, as in transformers' ``generate``.
        young: bool [n], the rows that must not end yet: none of ``sampling.stop`` is drawn; ``None``: no row.

    Raises:
        ValueError: the temperature is above 0 and there is no noise.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        noise = None
    elif noise is None:
        raise ValueError(f"sampling at temperature {sampling.temperature} needs noise; only greedy decoding has none")
    else:
        logits = logits / sampling.temperature
    support = None
    if young is not None:
        logits, support = _unending(logits, young, sampling.stop)
    kept = _kept(logits, sampling)
    if noise is None or kept is None:
        tokens = (logits if noise is None else logits + noise).argmax(-1, keepdim=True)
        normaliser = logits.logsumexp(-1, keepdim=True)
    else:
        choice = (kept.logits + noise.gather(1, kept.ids)).argmax(-1, keepdim=True)
        tokens, normaliser, support = kept.ids.gather(1, choice), kept.normaliser, kept.support()
    logprobs = (logits.gather(1, tokens) - normaliser).clamp_(max=0)  # rounding can leave it above 0
    return Drawn(tokens.squeeze(1), logprobs.squeeze(1), support)


def _unending(logits: Tensor, young: Tensor, stop: Sequence[int]) -> tuple[Tensor, DeviceSupport]:
    """Return ``logits``, those of stop tokens at minus infinity in the rows that must not end yet, and what is left."""
    within = sorted({token for token in stop if token < logits.shape[-1]})
    ends = torch.tensor(within, dtype=torch.int32, device=logits.device)
    barred = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    barred[ends.long()] = True
    allowed = logits.masked_fill(young.unsqueeze(1) & barred, -torch.inf)
    return allowed, DeviceSupport(ends.repeat(int(young.sum())), young.int().mul_(-len(ends)))


def _kept(logits: Tensor, sampling: Sampling) -> _Kept | None:
    """Return what ``top_k`` and ``top_p`` keep; ``None`` if that is everything, as it is for greedy decoding."""
    if sampling.temperature == 0 or (not 0 < sampling.top_k < logits.shape[-1] and sampling.top_p == 1):
        return None
    return _most_likely(logits, sampling) if sampling.top_k else _nucleus(logits, sampling.top_p)


def _most_likely(logits: Tensor, sampling: Sampling) -> _Kept:
    best, ids = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1)
    if sampling.top_p < 1:
        best = _until(best, best.softmax(-1), sampling.top_p)[0]
    return _Kept(best, ids, best.logsumexp(-1, keepdim=True))


def _nucleus(logits: Tensor, top_p: float) -> _Kept:
    vocabulary, total = logits.shape[-1], logits.logsumexp(-1, keepdim=True)
    width = min(_NUCLEUS, vocabulary)
    best, ids = logits.topk(width, dim=-1)
    if width < vocabulary and bool(((best - total).exp().sum(-1) < top_p).any()):
        best, ids = logits.sort(-1, descending=True)
    best, mass = _until(best, (best - total).exp(), top_p)
    # Not a logsumexp of the best: its last bit would depend on their number, and so on the other rows.
    return _Kept(best, ids, total + mass.log())


def _until(best: Tensor, probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return ``best``, at minus infinity where better ones already have ``top_p`` of the mass, and the mass kept."""
    mass = probabilities.cumsum(-1)
    stays = mass - probabilities < top_p
    return best.masked_fill(~stays, -torch.inf), mass.gather(1, (stays.sum(-1, keepdim=True) - 1).clamp_(min=0))


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
