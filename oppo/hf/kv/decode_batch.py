"""Rows that take a token each, again and again, where they are: what does not change between decode steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from oppo.hf.kv.cache import KVView


@dataclass(slots=True)
class DecodeBatch:
    """Rows that are stepped together; ends when others are, or when anything is read or forgotten.

    Attributes:
        rows: in the order in which tokens come and outputs go.
        views: of its segments; row after row they make up the batch.
        positions: int64 [n], of the tokens to be read, in the order of the batch.
        picks: int64 [n], for each row of the batch its index in ``rows``; ``None`` when the orders agree.
    """

    rows: list[int]
    views: Sequence[KVView]
    positions: Tensor
    picks: Tensor | None

    @property
    def end(self) -> int:
        """How many columns the longest row has, the token to be read included."""
        return max(view.region.end for view in self.views)

    def goes_on(self, rows: Sequence[int], longest: int) -> bool:
        """Return whether ``rows`` are these, and none of them will have more than ``longest`` tokens."""
        return self.rows == rows and self.end <= longest

    def make_room(self) -> None:
        """Make sure that each row has room for another token, where it is: shapes follow from the rows alone."""
        for slab, region in self.views:
            if region.end > slab.columns:
                slab.reserve(0, region.end)
                region.forget_indices()

    def advance(self) -> None:
        """Take note that each row has a token more."""
        self.positions += 1
        for _, region in self.views:
            region.advance()
