"""The noise of tokens: standard Gumbel, a function of the seed and of a token's admission number, sample and position.

Integer arithmetic gives 31 random bits of each entry, and a table of quantiles (:func:`quantiles`) its noise, so that
every device gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.hf.kv.cache import take

AHEAD = 16  # positions of a row for which noise is made at once, at most: noise beyond the end of a response is wasted

ENTRIES = 2**18
"""About how many numbers are made at once, one position's at least: for fewer, calling torch dominates the cost."""


def signed(word: int, bits: int) -> int:
    word &= (1 << bits) - 1
    return word - (1 << bits) if word >> (bits - 1) else word


GOLDEN32 = 0x9E3779B1

MIX32 = (0x7FEB352D, 0x846CA68B)

_GOLDEN64 = signed(0x9E3779B97F4A7C15, 64)

_MIX64 = (signed(0xBF58476D1CE4E5B9, 64), signed(0x94D049BB133111EB, 64))

WITHIN = 13
"""The last bits of a float32, which say where in its cell of :func:`quantiles` a number is."""

CELLS = 2 ** (32 - WITHIN)


@cache
def quantiles() -> NDArray[np.float32]:
    """Return the standard Gumbel distribution's quantiles as lines, float32 [2, CELLS]: values, then slopes.

    A cell holds the numbers ``x`` whose float32 has the same first bits. The quantile at ``x / 2**32``, or from above
    if ``x`` is negative, is the cell's value plus its slope times the last bits: within 2e-6. A slope has so few bits
    that this product is exact. So the sum has the same bits wherever it is computed, fused to one operation or not;
    the logarithms of a CPU, a GPU and a compiler differ in the last one.
    """
    found = np.zeros((2, 2, CELLS // 2))
    for exponent in range(32):
        edges = np.minimum(np.linspace(1, 2, 2 ** (23 - WITHIN) + 1) * 2.0 ** (exponent - 32), 0.5)
        first = (127 + exponent) << (23 - WITHIN)
        for side, exponential in enumerate((-np.log1p(-edges), -np.log(edges))):
            values = -np.log(exponential)
            found[:, side, first : first + len(values) - 1] = values[:-1], np.diff(values) / 2**WITHIN
    table = found.reshape(2, CELLS).astype(np.float32)
    bits = table[1].view(np.int32)
    bits[:] = (bits + (1 << (WITHIN - 1))) & (-1 << WITHIN)
    return table


def table_on(device: torch.device) -> Tensor:
    return torch.from_numpy(quantiles()).to(device)


def keys_at(seed: int, places: Tensor) -> Tensor:
    """Return, of places int64 [n, 3], the halves of the keys of their noise, and the positions: int32 [n, 3]."""
    # Of the seed the low 64 bits count.
    key = torch.full_like(places[:, 0], signed(seed, 64))
    for word in places.unbind(1):
        key = _splitmix64(key) ^ word
    key = _splitmix64(key)
    low = (key & 0xFFFFFFFF) - ((key & 0x80000000) << 1)
    return torch.stack((low, key >> 32, places[:, 2]), 1).to(torch.int32)


def noise_of(keys: Tensor, ids: Tensor, table: Tensor) -> Tensor:
    """Return the noise of ``ids``, [V] or [n, k], for keys int32 [n, 3], by a table of quantiles: float32 [n, ...]."""
    low, high, _ = keys[:, :, None].unbind(1)
    word = _hash32((ids.to(torch.int32) * signed(GOLDEN32, 32)) ^ low, high)
    bits = word.bitwise_left_shift_(1).to(torch.float32).add_(1).view(torch.int32)  # an odd number
    cells = (bits >> WITHIN).bitwise_and_(CELLS - 1).flatten()
    within = bits.bitwise_and_((1 << WITHIN) - 1).to(torch.float32).flatten()
    return within.mul_(table[1].index_select(0, cells)).add_(table[0].index_select(0, cells)).view(len(keys), -1)


class Noise:
    """Returns keys of tokens, or their noise, made for several positions ahead."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.table = table_on(device)
        self._seed = seed
        self._columns: dict[tuple[int, int], int] = {}  # where each row is in the block
        self._starts: list[int] = []  # the position of each row at which the block begins
        self._places = torch.empty(0, 3)  # [rows, 3]: admission number, sample and that position
        self._block = torch.empty(0, 0, 0)  # [positions, rows, V or 3]

    def __call__(self, rows: Sequence[tuple[int, int]], positions: Sequence[int], vocabulary: int = 0) -> Tensor:
        """Of the next token of each row (admission number, sample), not to be written to: noise float32 [n, V].

        Without a vocabulary its key, int32 [n, 3].
        """
        columns, device = [self._columns.get(row, -1) for row in rows], self.table.device
        offsets = {at - self._starts[column] for at, column in zip(positions, columns, strict=True) if column >= 0}
        if -1 in columns or len(offsets) > 1:
            self._places = torch.tensor([(*row, at) for row, at in zip(rows, positions, strict=True)], device=device)
        else:
            (offset,) = offsets
            if 0 <= offset < len(self._block) and self._block.shape[2] == (vocabulary or 3):
                return take(self._block[offset], columns)
            self._places = take(self._places, columns).clone()  # nothing crosses to the device
            self._places[:, 2] += offset
        count = max(1, min(AHEAD, ENTRIES // (len(rows) * max(1, vocabulary))))
        ahead = self._places.repeat(count, 1)
        ahead[:, 2] += torch.arange(count, device=device).repeat_interleave(len(rows))
        made = keys_at(self._seed, ahead)
        if vocabulary:
            made = noise_of(made, torch.arange(vocabulary, device=device), self.table)
        self._columns, self._starts = {row: at for at, row in enumerate(rows)}, list(positions)
        self._block = made.view(count, len(rows), -1)
        return self._block[0]


def _shifted(word: Tensor, by: int, bits: int) -> Tensor:
    # ``word >>> by``: torch's shift of a signed integer copies the sign instead.
    return (word >> by).bitwise_and_((1 << (bits - by)) - 1)


def _splitmix64(state: Tensor) -> Tensor:
    # Steele, Lea, Flood, 2014.
    word = state + _GOLDEN64
    word = (word ^ _shifted(word, 30, 64)) * _MIX64[0]
    word = (word ^ _shifted(word, 27, 64)) * _MIX64[1]
    return word ^ _shifted(word, 31, 64)


def _hash32(word: Tensor, key: Tensor) -> Tensor:
    # The last 31 bits are random; words are overwritten: lowbias32 (Wellons, 2018), keyed half-way.
    word ^= _shifted(word, 16, 32)
    word *= signed(MIX32[0], 32)
    word += key
    word ^= _shifted(word, 15, 32)
    word *= signed(MIX32[1], 32)
    word ^= _shifted(word, 16, 32)
    return word
