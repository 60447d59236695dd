"""Drawing tokens: the argmax of logits plus Gumbel noise, over the ids that truncation keeps.

``argmax(logits + g)`` with independent standard Gumbel ``g`` is a sample from ``softmax(logits)`` (Gumbel, 1954;
Maddison et al., 2014, "A* sampling"). Unlike inverting a cumulative sum it is robust: an error of 1e-6 in one logit
changes the token only where the two best perturbed logits nearly tie, so the same noise gives the same tokens under
another batch shape, chunking or device. The noise is a function of the seed and of a token's admission number, sample
and position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oppo.models import Sampling

_NUCLEUS = 1024
"""Tokens among which the nucleus of ``top_p`` is searched first: sorting a whole vocabulary is slow."""


class DeviceSupport(NamedTuple):
    """An :class:`oppo.events.Support` on the device of the logits.

    Attributes:
        ids: int32 [S].
        counts: int32 [n]; above 0, the token was one of so many ids; below 0, any but so many; 0: any id.
    """

    ids: Tensor
    counts: Tensor


class Drawn(NamedTuple):
    """Tokens, int64 [n], their log-probs, float32 [n], and their support: ``None`` if no id was left out."""

    tokens: Tensor
    logprobs: Tensor
    support: DeviceSupport | None


class _Kept(NamedTuple):
    """The largest logits of each row, descending, float32 [n, k]; minus infinity outside of what truncation keeps.

    Attributes:
        ids: int64 [n, k].
        normaliser: float32 [n, 1], the logsumexp of the logits kept.
    """

    logits: Tensor
    ids: Tensor
    normaliser: Tensor

    def support(self) -> DeviceSupport:
        kept = self.logits > -torch.inf
        return DeviceSupport(self.ids[kept].int(), kept.sum(-1, dtype=torch.int32))


def draw(logits: Tensor, noise: Tensor | None, sampling: Sampling, too_short: Tensor | None = None) -> Drawn:
    """Return the tokens sampled from ``logits`` with ``noise``, their log-probs and their support.

    A log-prob is of the distribution that the token was sampled from: at the sampling temperature (1 when greedy),
    truncated and renormalised.

    Args:
        logits: [n, V], of any floating type; the arithmetic is float32.
        noise: float32 [n, V], standard Gumbel; ``None`` only when the temperature is 0.
        sampling: temperature, then ``top_k``, then ``top_p``, as in transformers' ``generate``.
        too_short: bool [n], the rows that must not end yet: they get no token of ``sampling.stop``; ``None``:
            no row.

    Raises:
        ValueError: the temperature is above 0 and ``noise`` is ``None``.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        noise = None
    elif noise is None:
        raise ValueError(f"sampling at temperature {sampling.temperature} needs noise; only greedy decoding has none")
    else:
        logits = logits / sampling.temperature
    support = None
    if too_short is not None:
        logits, support = _without_stop(logits, too_short, sampling.stop)
    kept = _kept(logits, sampling)
    if noise is None or kept is None:
        tokens = (logits if noise is None else logits + noise).argmax(-1, keepdim=True)
        normaliser = logits.logsumexp(-1, keepdim=True)
    else:
        choice = (kept.logits + noise.gather(1, kept.ids)).argmax(-1, keepdim=True)
        tokens, normaliser, support = kept.ids.gather(1, choice), kept.normaliser, kept.support()
    logprobs = (logits.gather(1, tokens) - normaliser).clamp_(max=0)  # rounding can leave it above 0
    return Drawn(tokens.squeeze(1), logprobs.squeeze(1), support)


def _without_stop(logits: Tensor, too_short: Tensor, stop: Sequence[int]) -> tuple[Tensor, DeviceSupport]:
    within = sorted({token for token in stop if token < logits.shape[-1]})
    ends = torch.tensor(within, dtype=torch.int32, device=logits.device)
    barred = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    barred[ends.long()] = True
    allowed = logits.masked_fill(too_short.unsqueeze(1) & barred, -torch.inf)
    return allowed, DeviceSupport(ends.repeat(int(too_short.sum())), too_short.int().mul_(-len(ends)))


def _kept(logits: Tensor, sampling: Sampling) -> _Kept | None:
    if sampling.temperature == 0 or (not 0 < sampling.top_k < logits.shape[-1] and sampling.top_p == 1):
        return None
    if not sampling.top_k:
        return _nucleus(logits, sampling.top_p)
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
    # No logsumexp of the best: its last bit would depend on their number, and so on the other rows.
    return _Kept(best, ids, total + mass.log())


def _until(best: Tensor, probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    mass = probabilities.cumsum(-1)
    stays = mass - probabilities < top_p
    return best.masked_fill(~stays, -torch.inf), mass.gather(1, (stays.sum(-1, keepdim=True) - 1).clamp_(min=0))


AHEAD = 16
"""Positions of a row for which noise is made at once, at most: noise beyond the end of a response is wasted."""

ENTRIES = 2**18
"""About how many numbers are made at once, one position's at least: for fewer, calling torch dominates the cost."""


def _signed(word: int, bits: int) -> int:
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


_GOLDEN64 = _signed(0x9E3779B97F4A7C15, 64)

_MIX64 = (_signed(0xBF58476D1CE4E5B9, 64), _signed(0x94D049BB133111EB, 64))

_GOLDEN32 = _signed(0x9E3779B1, 32)

_MIX32 = (_signed(0x7FEB352D, 32), _signed(0x846CA68B, 32))


def gumbel(seed: int, admission: Tensor, sample: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Return standard Gumbel noise, float32 [n, vocabulary], that depends only on the arguments of its row.

    Integer arithmetic up to the last two logarithms: the 31 random bits of an entry are the same on every device.

    Args:
        seed: any integer; its low 64 bits count.
        admission, sample, position: int64 [n], of the token to be sampled.
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


class Noise:
    """Returns the noise of :func:`gumbel`, bit for bit, made for several positions ahead.

    Args:
        seed: keys the noise.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._columns: dict[tuple[int, int], int] = {}  # where each row is in the block
        self._starts: list[int] = []  # the position of each row at which the block begins
        self._block = torch.empty(0, 0, 0)  # [positions, rows, V]

    def __call__(
        self, rows: Sequence[tuple[int, int]], positions: Sequence[int], vocabulary: int, device: torch.device
    ) -> Tensor:
        """Return standard Gumbel noise, float32 [n, vocabulary] on ``device``, not to be written to.

        Args:
            rows: admission number and sample of each row.
            positions: of the token that each row is about to draw.
            vocabulary: entries per row.
        """
        offset = self._offset(rows, positions)
        if offset is None or self._block.shape[2] != vocabulary or self._block.device != device:
            self._make(rows, positions, vocabulary, device)
            offset = 0
        noise = self._block[offset]
        if len(rows) == len(self._columns) and list(self._columns) == list(rows):
            return noise
        return noise[[self._columns[row] for row in rows]]

    def _offset(self, rows: Sequence[tuple[int, int]], positions: Sequence[int]) -> int | None:
        columns = [self._columns.get(row, -1) for row in rows]
        if -1 in columns:
            return None
        offsets = {position - self._starts[column] for position, column in zip(positions, columns, strict=True)}
        (offset, *others) = offsets
        return None if others or not 0 <= offset < len(self._block) else offset

    def _make(
        self, rows: Sequence[tuple[int, int]], positions: Sequence[int], vocabulary: int, device: torch.device
    ) -> None:
        count = max(1, min(AHEAD, ENTRIES // (len(rows) * vocabulary)))
        places = torch.tensor([(*row, at) for row, at in zip(rows, positions, strict=True)], device=device)
        admission, sample, start = places.repeat(count, 1).unbind(1)
        ahead = torch.arange(count, device=device).repeat_interleave(len(rows))
        noise = gumbel(self._seed, admission, sample, start + ahead, vocabulary)
        self._block = noise.view(count, len(rows), vocabulary)
        self._columns, self._starts = {row: at for at, row in enumerate(rows)}, list(positions)


def _shifted(word: Tensor, by: int, bits: int) -> Tensor:
    # ``word >>> by``: torch's shift of a signed integer copies the sign instead.
    return (word >> by).bitwise_and_((1 << (bits - by)) - 1)


def _splitmix64(state: Tensor) -> Tensor:
    # Steele, Lea, Flood, 2014.
    word = state + _GOLDEN64
    word = (word ^ _shifted(word, 30, 64)) * _MIX64[0]
    word = (word ^ _shifted(word, 27, 64)) * _MIX64[1]
    return word ^ _shifted(word, 31, 64)


def _signed_halves(word: Tensor) -> tuple[Tensor, Tensor]:
    low = (word & 0xFFFFFFFF) - ((word & 0x80000000) << 1)
    return low.to(torch.int32), (word >> 32).to(torch.int32)


def _hash32(word: Tensor, key: Tensor) -> Tensor:
    # 31 random bits for each word, which is overwritten: lowbias32 (Wellons, 2018), keyed half-way.
    word ^= _shifted(word, 16, 32)
    word *= _MIX32[0]
    word += key
    word ^= _shifted(word, 15, 32)
    word *= _MIX32[1]
    word ^= _shifted(word, 16, 32)
    return word.bitwise_and_(0x7FFFFFFF)
