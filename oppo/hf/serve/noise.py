"""The noise of tokens: standard Gumbel, a function of the seed and of a token's admission number, sample and position.

Integer arithmetic gives 31 random bits of each entry, and a table of quantiles (:func:`quantiles`) its noise, so that
every device gives the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
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
def quantiles() -> Tensor:
    """Return the standard Gumbel distribution's quantiles as lines, float32 [2, CELLS]: values, then slopes.

    A cell holds the numbers ``x`` whose float32 has the same first bits. The quantile at ``x / 2**32``, or from above
    if ``x`` is negative, is the cell's value plus its slope times the last bits: within 1e-6. A slope has so few bits
    that this product is exact. So the sum has the same bits wherever it is computed, fused to one operation or not;
    the logarithms of a CPU, a GPU and a compiler differ in the last one.
    """
    found = np.zeros((2, 2, CELLS // 2))
    for exponent in range(32):
        edges = np.minimum((1 + np.linspace(0, 1, 2 ** (23 - WITHIN) + 1)) * 2.0 ** (exponent - 32), 0.5)
        first = (127 + exponent) << (23 - WITHIN)
        for side, exponential in enumerate((-np.log1p(-edges), -np.log(edges))):
            values = -np.log(exponential)
            found[:, side, first : first + len(values) - 1] = values[:-1], np.diff(values) / 2**WITHIN
    table = torch.from_numpy(found.reshape(2, CELLS).astype(np.float32))
    table[1].view(torch.int32).add_(1 << (WITHIN - 1)).bitwise_and_(-1 << WITHIN)
    return table


def gumbel(seed: int, admission: Tensor, sample: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Return standard Gumbel noise, float32 [n, vocabulary], that depends only on the arguments of its row."""
    keys = keys_at(seed, torch.stack((admission, sample, position), -1))
    return noise_of(keys, vocabulary, quantiles().to(keys.device))


def keys_at(seed: int, places: Tensor) -> Tensor:
    """Return, of places int64 [n, 3], the halves of the keys of their noise, and the positions: int32 [n, 3]."""
    # Of the seed the low 64 bits count.
    key = torch.full_like(places[:, 0], signed(seed, 64))
    for word in places.unbind(1):
        key = _splitmix64(key) ^ word
    key = _splitmix64(key)
    low = (key & 0xFFFFFFFF) - ((key & 0x80000000) << 1)
    return torch.stack((low, key >> 32, places[:, 2]), 1).to(torch.int32)


def noise_of(keys: Tensor, vocabulary: int, table: Tensor) -> Tensor:
    """Return the noise of ``keys``, int32 [n, 3], by the ``table`` of :func:`quantiles`: float32 [n, vocabulary]."""
    # A longer row begins with the shorter one.
    low, high, _ = keys.unbind(1)
    tokens = torch.arange(vocabulary, dtype=torch.int32, device=keys.device) * signed(GOLDEN32, 32)
    word = _hash32(tokens ^ low.unsqueeze(1), high.unsqueeze(1))
    bits = word.bitwise_left_shift_(1).to(torch.float32).add_(1).view(torch.int32)  # an odd number
    cells = (bits >> WITHIN).bitwise_and_(CELLS - 1).flatten()
    within = bits.bitwise_and_((1 << WITHIN) - 1).to(torch.float32).flatten()
    return within.mul_(table[1].index_select(0, cells)).add_(table[0].index_select(0, cells)).view(len(keys), -1)


class Noise:
    """Returns the noise of :func:`gumbel`, bit for bit; keys, and noise of small tables, are made ahead."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self.table = quantiles().to(device)
        self._seed = seed
        self._columns: dict[tuple[int, int], int] = {}  # where each row is in keys and block
        self._starts: list[int] = []  # the position of each row at which the keys begin
        self._places = torch.empty(0, 3)  # [rows, 3]: admission number, sample and that position
        self._keys = torch.empty(0, 0, 3)  # [positions, rows, 3]
        self._block = torch.empty(0, 0, 0)  # [positions, rows, V], the first of them ``_first`` positions after
        self._first = 0

    def keys(self, rows: Sequence[tuple[int, int]], positions: Sequence[int]) -> Tensor:
        """Return the keys, int32 [n, 3], of the next token of each row (admission number, sample)."""
        offset, columns = self._at(rows, positions)
        return take(self._keys[offset], columns)

    def __call__(self, rows: Sequence[tuple[int, int]], positions: Sequence[int], vocabulary: int) -> Tensor:
        """The noise of the next token of each row: float32 [n, vocabulary], not to be written to."""
        offset, columns = self._at(rows, positions)
        if not 0 <= offset - self._first < len(self._block) or self._block.shape[2] != vocabulary:
            if len(columns) < len(self._starts):  # others make no noise any more
                self._starts, self._places = [self._starts[at] for at in columns], take(self._places, columns)
                self._keys = take(self._keys.transpose(0, 1), columns).transpose(0, 1)
                columns = [*range(len(rows))]
                self._columns = dict(zip(rows, columns, strict=True))
            count = max(1, min(AHEAD - offset, ENTRIES // (len(rows) * vocabulary)))
            keys = self._keys[offset : offset + count].flatten(0, 1)
            self._block, self._first = noise_of(keys, vocabulary, self.table).view(count, -1, vocabulary), offset
        return take(self._block[offset - self._first], columns)

    def _at(self, rows: Sequence[tuple[int, int]], positions: Sequence[int]) -> tuple[int, list[int]]:
        columns = [self._columns.get(row, -1) for row in rows]
        offsets = {at - self._starts[column] for at, column in zip(positions, columns, strict=True) if column >= 0}
        if -1 in columns or len(offsets) > 1:
            device = self.table.device
            places = torch.tensor([(*row, at) for row, at in zip(rows, positions, strict=True)], device=device)
        else:
            (offset,) = offsets
            if 0 <= offset < AHEAD:
                return offset, columns
            places = take(self._places, columns).clone()  # nothing crosses to the device
            places[:, 2] += offset
        self._columns, self._starts = {row: at for at, row in enumerate(rows)}, list(positions)
        self._places, self._block = places, self._block[:0]
        ahead = places.repeat(AHEAD, 1)
        ahead[:, 2] += torch.arange(AHEAD, device=places.device).repeat_interleave(len(rows))
        self._keys = keys_at(self._seed, ahead).view(AHEAD, -1, 3)
        return 0, [*range(len(rows))]


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
