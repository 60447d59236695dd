"""Noise for rows that draw a token at a time, made for several of their positions at once."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from oppo.hf.serve.sampling import gumbel

AHEAD = 16
"""Noise is made for at most so many positions of a row: what is not drawn, because the row has ended, is wasted."""

ENTRIES = 2**18
"""About so many numbers are made at once, or those of one position: the cost of few is that of calling torch."""


class Noise:
    """Gives each row the Gumbel noise of its place, exactly as :func:`~oppo.hf.serve.sampling.gumbel` does.

    Args:
        seed: keys the noise.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._columns: dict[tuple[int, int], int] = {}  # of each row in the block
        self._starts: list[int] = []  # the position of each row at which the block begins
        self._block = torch.empty(0, 0, 0)  # [positions, rows, V]

    def __call__(
        self, rows: Sequence[tuple[int, int]], positions: Sequence[int], vocabulary: int, device: torch.device
    ) -> Tensor:
        """Return float32 [n, vocabulary] on ``device``; not to be written to.

        Args:
            rows: admission number and sample of each.
            positions: of the token that each is about to draw.
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
        """Return where in the block the noise of all ``rows`` is; ``None`` if it is not there, or in several places."""
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
        made = gumbel(self._seed, admission, sample, start + ahead, vocabulary)
        self._block = made.view(count, len(rows), vocabulary)
        self._columns, self._starts = {row: at for at, row in enumerate(rows)}, list(positions)
