"""The support of a sampled token: the ids it was drawn from, where sampling left some out.

``top_k``, ``top_p`` and ``min_new_tokens`` truncate the distribution of a token. Its log-prob is then one over what was
kept, and whoever computes it again, with other weights or another model, must normalise over the same ids; over the
whole vocabulary importance ratios are biased ("Keep Sampling Mask", DeepSeek-V3.2, arXiv 2512.02556, section 3.1).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Support:
    """The ids from which some tokens were drawn; ragged, 4 bytes an id and 4 a token, nothing where all was kept.

    Attributes:
        ids: int32 [S], those of one token after those of the other.
        counts: int32 [n], how many of the ids are a token's. Above 0: it was one of exactly these. Below 0: it was any
            but these, so that leaving a few out needs no list of the others. 0: it was any.
            With no count at all, every token was any: the support of any number of tokens, and the default.

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
        """Return the support of tokens end to end, given that of each part and how many tokens it has."""
        parts = list(parts)
        if all(support.whole for support, _ in parts):
            return cls()
        return cls(
            np.concatenate([support.ids for support, _ in parts]),
            np.concatenate([support.counts if len(support.counts) else np.zeros(n, np.int32) for support, n in parts]),
        )

    @property
    def whole(self) -> bool:
        """Whether nothing was left out for any token."""
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
        """Return of each of its tokens whether it could have been drawn: bool [n]."""
        if self.whole:
            return np.ones(len(tokens), np.bool_)
        owner = np.repeat(np.arange(len(tokens)), np.abs(self.counts))
        listed = np.zeros(len(tokens), np.bool_)
        listed[owner[self.ids == tokens[owner]]] = True
        held: NDArray[np.bool_] = listed == (self.counts > 0)
        return held
