"""The overlap of scoring with decoding and training: arithmetic on spans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from oppo.observe import Role, Span

Interval: TypeAlias = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Occupation:
    """Busy seconds of each role; spans that overlap count once.

    Attributes:
        decode, score, update: seconds in which at least one track of the role was busy.
        exposed: seconds in which a scorer was busy while nothing decoded or trained.
    """

    decode: float
    score: float
    update: float
    exposed: float

    @property
    def hidden(self) -> float:
        """The fraction of the scoring time hidden behind decoding or training, 0 to 1; NaN without scoring."""
        return 1 - self.exposed / self.score if self.score else math.nan


def occupation(work: Iterable[Span], beside: Iterable[Span] = ()) -> Occupation:
    """Return the busy seconds of each role in the work of stages, or of models.

    Args:
        work: that counts; spans of other roles and of none are left out.
        beside: other work, of which decoding and training hide scoring, and which counts for nothing else.

    Example:
        >>> spans = [Span("actor", "decode", 0, 3, role="decode"), Span("reward", "extend", 2, 4, role="score")]
        >>> occupation(spans).hidden
        0.5
    """
    work = list(work)
    decode, score, update = busy(work, "decode"), busy(work, "score"), busy(work, "update")
    hiding = union([*decode, *update, *busy(beside, "decode", "update")])
    exposed = seconds(union([*score, *hiding])) - seconds(hiding)
    return Occupation(seconds(decode), seconds(score), seconds(update), max(0.0, exposed))


def busy(work: Iterable[Span], *roles: Role) -> list[Interval]:
    """Return the disjoint intervals in which something of these roles worked, in order."""
    return union((span.start, span.end) for span in work if span.role in roles)


def union(intervals: Iterable[Interval], *, gap: float = 0.0) -> list[Interval]:
    """Return the union as disjoint intervals in order, without empty ones; gaps of up to ``gap`` are closed."""
    merged: list[Interval] = []
    for start, end in sorted(intervals):
        if end <= start:
            continue
        if merged and start <= merged[-1][1] + gap:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def seconds(disjoint: Sequence[Interval]) -> float:
    """Return the total length of disjoint intervals."""
    return math.fsum(end - start for start, end in disjoint)
