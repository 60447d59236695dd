"""The support of a sampled token: the ids it was drawn from, where sampling left some out.

``top_k``, ``top_p`` and ``min_new_tokens`` truncate the distribution of a token. Its log-prob, with these or other
weights or under another model, must then be normalised over the ids that were kept; normalised over the whole
vocabulary, importance ratios are biased ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The ids from which some tokens were drawn; ragged, 4 bytes for each id and token, empty without truncation.

    Attributes:
        ids: int32 [S], token after token.
        counts: int32 [n], the number of ids that belong to each token. Above 0: the ids that it was drawn from. Below
            0: the ids that were excluded, so that excluding a few needs no list of the others. 0: none was excluded.
            Empty, the default: no id was excluded for any number of tokens.

    Example:
        >>> one = Support(np.array([4, 7, 9], np.int32), np.array([3], np.int32))
        >>> Support.concatenate([(Support(), 2), (one, 1)]).counts.tolist()
        [0, 0, 3]
        >>> one.holds(np.array([7], np.int32)).tolist()
        [True]
    """

    ids: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    counts: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __post_init__(self) -> None:
        listed = int(np.abs(self.counts).sum())
        if listed != len(self.ids):
            raise ValueError(f"a support of {len(self.counts)} tokens counts {listed} ids, but holds {len(self.ids)}")

    @classmethod
    def concatenate(cls, parts: Iterable[tuple[Support, int]]) -> Support:
        """Return the support of tokens end to end, from the support and the number of tokens of each part."""
        parts = list(parts)
        if all(support.whole for support, _ in parts):
            return cls()
        return cls(
            np.concatenate([support.ids for support, _ in parts]),
            np.concatenate([support.counts if len(support.counts) else np.zeros(n, np.int32) for support, n in parts]),
        )

    @property
    def whole(self) -> bool:
        """Whether no id was excluded for any token."""
        return not len(self.ids)

    def describes(self, count: int) -> bool:
        """Return whether it can be the support of ``count`` tokens."""
        return len(self.counts) in {0, count}

    def slice(self, start: int, stop: int) -> Support:
        """Return the support of tokens ``start .. stop``; the ids are a view."""
        if not len(self.counts):
            return self
        first, last = np.abs(self.counts[:start]).sum(), np.abs(self.counts[:stop]).sum()
        return Support(self.ids[first:last], self.counts[start:stop])

    def split(self, count: int) -> Sequence[Support]:
        """Return the support of each of its ``count`` tokens alone; the ids are views."""
        if not len(self.counts):
            return [self] * count
        bounds = [0, *np.cumsum(np.abs(self.counts)).tolist()]
        return [
            Support(self.ids[first:last], self.counts[n : n + 1]) for n, (first, last) in enumerate(pairwise(bounds))
        ]

    def holds(self, tokens: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return whether each of its tokens could have been drawn: bool [n]."""
        if self.whole:
            return np.ones(len(tokens), np.bool_)
        owner = np.repeat(np.arange(len(tokens)), np.abs(self.counts))
        listed = np.zeros(len(tokens), np.bool_)
        listed[owner[self.ids == tokens[owner]]] = True
        held: NDArray[np.bool_] = listed == (self.counts > 0)
        return held
