"""Gumbel noise: a function of the seed and of a token's admission number, sample and position."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

AHEAD = 16
"""Positions of a row for which noise is made at once, at most: noise beyond the end of a response is wasted."""

ENTRIES = 2**18
"""About how many numbers are made at once, one position's at least: for fewer, calling torch dominates the cost."""


def _signed(word: int, bits: int) -> int:
    """Return the unsigned ``word`` as the signed integer with the same bits."""
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
        admission, sample, position: int64 [n], of the token to be drawn.
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
        """Return the position in the block at which all ``rows`` are; ``None`` if there is no such position."""
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
