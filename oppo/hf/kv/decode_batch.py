"""What successive decode steps over the same rows share: their views, positions and order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from oppo.hf.kv.cache import KVView


@dataclass(slots=True)
class DecodeBatch:
    """Rows that decode together; valid until other rows are stepped, or any row is extended or forgotten.

    Attributes:
        rows: in the order of tokens and outputs.
        views: of its segments, whose rows one after another form the batch.
        positions: int64 [n], of the tokens to be read, in batch order.
        picks: int64 [n], the index in ``rows`` of each row of the batch; ``None`` when the orders agree.
    """

    rows: list[int]
    views: Sequence[KVView]
    positions: Tensor
    picks: Tensor | None

    @property
    def end(self) -> int:
        """Columns of the longest row, the token to be read included."""
        return max(view.region.end for view in self.views)

    def continues(self, rows: Sequence[int], longest: int) -> bool:
        """Return whether the batch consists of ``rows``, and none of them exceeds ``longest`` tokens in this step."""
        return self.rows == rows and self.end <= longest

    def make_room(self) -> None:
        """Reserve a column for the next token of each row in its slab."""
        for slab, region in self.views:
            slab.reserve(0, region.end)

    def advance(self) -> None:
        """Move each row on by one token."""
        self.positions += 1
        for _, region in self.views:
            region.advance()
