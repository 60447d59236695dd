"""A decode phase in a few stretches: between their borders it is known how much was decoded, and for how long."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from oppo.admission import Stretch

MOST: Final = 8
"""The most stretches of a phase: enough to tell what a decode step costs from what its rows cost."""


@dataclass(frozen=True, slots=True)
class Grown:
    """The tokens of a rollout that were decoded in a phase.

    Attributes:
        prompt: tokens of its prompt.
        start, stop: tokens of its response at the beginning and at the end.
        ended: loop time of its last piece, in seconds; NaN if it did not end.
        joined: decode steps of the phase before it was decoded.
    """

    prompt: int
    start: int
    stop: int
    ended: float
    joined: int = 0

    @property
    def last(self) -> int:
        """The decode steps of the phase up to its last token: it gained one in each while it was live."""
        return self.joined + self.stop - self.start

    @property
    def context(self) -> int:
        """Tokens that were read before it was decoded on."""
        return self.prompt + self.start

    def within(self, first: int, last: int) -> tuple[int, int]:
        """Return the tokens that it gained in the decode steps ``first .. last``, and the sum of its context there."""
        gain = self.stop - self.start
        begin, end = (min(max(step - self.joined, 0), gain) for step in (first, last))
        return end - begin, (end - begin) * self.context + (end * (end - 1) - begin * (begin - 1)) // 2


def stretches(rollouts: Sequence[Grown], begin: float, end: float) -> tuple[Stretch, ...]:
    """Return the stretches of a phase between two loop times: none if nothing was decoded.

    Each ends with a decode step in which a rollout ended, the last one with the phase.
    """
    steps = max((each.last for each in rollouts if each.stop > each.start), default=0)
    if not steps:
        return ()
    borders = [(0, begin)]
    for each in sorted(rollouts, key=lambda each: (each.last, each.ended)):
        far = each.last - borders[-1][0] >= steps / MOST
        if far and each.last < steps and borders[-1][1] < each.ended < end:
            borders.append((each.last, each.ended))
    borders.append((steps, end))
    return tuple(_stretch(rollouts, *first, *last) for first, last in pairwise(borders))


def _stretch(rollouts: Sequence[Grown], first: int, begin: float, last: int, end: float) -> Stretch:
    gained, context = zip(*(each.within(first, last) for each in rollouts), strict=True)
    began = [each for each in rollouts if first <= each.joined < last]
    return Stretch(
        end - begin,
        last - first,
        sum(gained),
        sum(context),
        opened=sum(each.context for each in began if not each.start),
        resumed=sum(each.context for each in began if each.start),
        ended=sum(first < each.last <= last and not math.isnan(each.ended) for each in rollouts),
    )
