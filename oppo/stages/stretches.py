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
class Decoded:
    """What was decoded of a rollout in a phase.

    Attributes:
        prompt: tokens of its prompt.
        start, stop: tokens of its response at the beginning and at the end.
        ended: seconds from the beginning to its last piece; NaN if it did not end.
    """

    prompt: int
    start: int
    stop: int
    ended: float

    @property
    def gain(self) -> int:
        """Tokens that it gained: one in each decode step while it was live."""
        return self.stop - self.start

    def within(self, first: int, last: int) -> tuple[int, int]:
        """Return the tokens that it gained in the decode steps ``first .. last``, and the sum of its context there."""
        begin, end = min(first, self.gain), min(last, self.gain)
        known = self.prompt + self.start
        return end - begin, (end - begin) * known + (end * (end - 1) - begin * (begin - 1)) // 2


def stretches(rollouts: Sequence[Decoded], seconds: float) -> tuple[Stretch, ...]:
    """Return the stretches of a phase of so many seconds: none if nothing was decoded.

    Each ends with a decode step in which a rollout ended, the last one with the phase. All rollouts are live from the
    first decode step on.
    """
    steps = max((each.gain for each in rollouts), default=0)
    if not steps:
        return ()
    borders = [(0, 0.0)]
    for each in sorted(rollouts, key=lambda each: (each.gain, each.ended)):
        far = each.gain - borders[-1][0] >= steps / MOST
        if far and each.gain < steps and borders[-1][1] < each.ended < seconds:
            borders.append((each.gain, each.ended))
    borders.append((steps, seconds))
    found = []
    for (first, begin), (last, end) in pairwise(borders):
        gained, context = zip(*(each.within(first, last) for each in rollouts), strict=True)
        found.append(Stretch(end - begin, last - first, sum(gained), sum(context)))
    opened = sum(each.prompt for each in rollouts if not each.start)
    resumed = sum(each.prompt + each.start for each in rollouts if each.start)
    first_one = found[0]
    found[0] = Stretch(first_one.seconds, first_one.steps, first_one.tokens, first_one.context, opened, resumed)
    return tuple(each for each in found if math.isfinite(each.seconds))
