"""The overlap of scoring with decoding and training: arithmetic on spans."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from oppo.observe import Span

Role: TypeAlias = Literal["decode", "score", "update"]
Interval: TypeAlias = tuple[float, float]

WORK: Mapping[str, Role] = {
    "decode": "decode",
    "extend": "score",
    "finish": "score",
    "update": "update",
    "publish": "update",
}
"""The roles of the work that stages note (:meth:`oppo.Step.working`), by its label."""


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


def occupation(spans: Iterable[Span], roles: Mapping[str, Role]) -> Occupation:
    """Return the busy seconds of each role; spans of tracks without a role are left out.

    Args:
        spans: of models, or the work of stages.
        roles: by track.

    Example:
        >>> spans = [Span("actor", "decode", 0, 3), Span("reward", "extend", 2, 4)]
        >>> occupation(spans, {"actor": "decode", "reward": "score"}).hidden
        0.5
    """
    return _occupation((roles.get(span.track), span) for span in spans)


def work_occupation(work: Iterable[Span], beside: Iterable[Span] = ()) -> Occupation:
    """Return the busy seconds of each role in the work of stages; work without a role is left out.

    Args:
        work: that counts, its roles by label (:data:`WORK`).
        beside: other decoding and training that hides scoring, and counts for nothing else.
    """
    work = list(work)
    hiding = [span for span in beside if WORK.get(span.label) in {"decode", "update"}]
    exposed = _occupation((WORK.get(span.label), span) for span in [*work, *hiding]).exposed
    return replace(_occupation((WORK.get(span.label), span) for span in work), exposed=exposed)


def _occupation(spans: Iterable[tuple[Role | None, Span]]) -> Occupation:
    intervals: dict[Role, list[Interval]] = {"decode": [], "score": [], "update": []}
    for role, span in spans:
        if role is not None:
            intervals[role].append((span.start, span.end))
    decode, score, update = (union(intervals[role]) for role in ("decode", "score", "update"))
    exposed = seconds(union([*score, *decode, *update])) - seconds(union([*decode, *update]))
    return Occupation(seconds(decode), seconds(score), seconds(update), max(0.0, exposed))


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
