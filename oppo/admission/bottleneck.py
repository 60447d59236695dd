"""The bottleneck of a step: the largest part of its time, and the speed-up that a schedule could give at most.

A step's seconds T = D + E + R consist of decoding, the wait for scores after decoding, and the rest
(:class:`~oppo.admission.Observation`). The scorer that was busy longest was busy for S seconds, M of them during
decoding. Five parts follow::

    full    = tokens / (rows * decode steps)       the share of row slots in decode steps that made a token
    paced   = min(M, D) if S >= D else 0           decoding at the pace of the slowest scorer

    decode  = (D - paced) * full                   decoding with every row live
    tail    = (D - paced) * (1 - full)             decode steps of rows whose responses had ended
    score   = E + paced
    train   = R                                    the update, and everything else

The tail is called ``cap`` if a response was decoded from its first token to the length cap: carrying stragglers has
then shortened nothing. The largest part is the bottleneck. With full overlap and no empty row a step takes

    least   = max(D * full, S) + R                 so  limit = T / least

is the speed-up at most. The bound is generous: it takes a decode step of fewer rows to cost as much as one of all, as
it nearly does on a GPU. It assumes the same models, no overlap of steps, and no more rows at a time: carrying more than
about half a batch adds so many rows that decoding can take less.

With lookahead the three phases of neighbouring steps overlap. The longest of D, S and R sets the pace, and its part is
all of its seconds, those of decoding divided by ``full`` as above. In what is left of T it waited for the two others:
theirs by their seconds, R and the scorer's after decoding, or D. Then

    least   = max(D * full, S, R)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from oppo.admission.observation import Observation, Scoring

StepPart: TypeAlias = Literal["decode", "tail", "cap", "score", "train"]
"""A part of a step's time."""

PARTS: tuple[StepPart, ...] = get_args(StepPart)
"""All parts; of equal ones the first is the largest."""

NUMBERS = ("limit", "scoring", "capped", "finished")
"""The other fields of a bottleneck that are metrics."""

PREFIX = "bottleneck/"
"""Prefix of its metrics' names."""

RESERVE = 2
"""Units to carry beyond the mean number that end at the cap: a step may have more."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The parts of the time of a step, or of some steps.

    Attributes:
        seconds: of all parts.
        shares: of each part, 0 to 1; their sum is 1.
        limit: largest speed-up by any overlap and any deferral of as many rows; 1 or more.
        scoring: busy time of the slowest scorer over that of decoding.
        capped: units per step that ended at the length cap.
        finished: units per step that were completed.

    Example:
        >>> seen = Observation(0, seconds=8.0, decode_seconds=4.0, decode_steps=9, tokens=9, rows=4, rest_seconds=4.0)
        >>> bottleneck(seen).largest, bottleneck(seen).limit
        ('train', 1.6)
    """

    seconds: float
    shares: Mapping[StepPart, float]
    limit: float
    scoring: float = 0.0
    capped: float = 0.0
    finished: float = 0.0

    @property
    def largest(self) -> StepPart:
        """The largest part."""
        return max(PARTS, key=lambda part: self.shares[part])

    @property
    def needed(self) -> int:
        """Units to carry to shorten a step whose tail is at the cap."""
        return round(self.capped + RESERVE)

    @property
    def sentence(self) -> str:
        """The bottleneck, its remedy, and the largest speed-up."""
        share = f"{self.shares[self.largest]:.0%}".replace("%", " %")
        return f"{self._meaning(share)}; no schedule of as many rows is more than {self.limit:.1f} times as fast"

    def _meaning(self, share: str) -> str:
        match self.largest:
            case "decode":
                return f"{share} of the step is decoding with every place taken: only a faster decode step would help"
            case "tail":
                return f"{share} of the step is lost to places left empty by the long tail: carry more stragglers"
            case "cap":
                return (
                    f"{share} of the step is lost while {self.capped:.2g} of {self.finished:.3g} run into the length "
                    f"cap: carrying fewer than those gains nothing, about {self.needed} are needed"
                )
            case "score" if self.scoring >= 1:
                return (
                    f"the slowest scorer is busy for {self.scoring:.1f} times as long as decoding, {share} of the "
                    "step: carrying stragglers gains nothing, faster scoring would"
                )
            case "score":
                return f"{share} of the step waits for scores after decoding: score responses while they are decoded"
            case "train":
                return f"the update takes {share} of the step: no schedule shortens that"

    def as_metrics(self) -> dict[str, float]:
        """Return this as metrics of a step, all but ``seconds``."""
        parts = {PREFIX + part: share for part, share in self.shares.items()}
        return parts | {PREFIX + name: getattr(self, name) for name in NUMBERS}

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float | None], seconds: float) -> Bottleneck | None:
        """Return the bottleneck whose :meth:`as_metrics` is in ``metrics``, or ``None``."""
        if any(metrics.get(PREFIX + name) is None for name in (*PARTS, *NUMBERS)):
            return None
        known = cast("Mapping[str, float]", metrics)
        shares = {part: known[PREFIX + part] for part in PARTS}
        return cls(seconds, shares, **{name: known[PREFIX + name] for name in NUMBERS})

    def as_json(self) -> dict[str, object]:
        """Return this as JSON values, with the sentence."""
        return {
            "bottleneck": self.largest,
            "sentence": self.sentence,
            "limit": self.limit,
            "shares": dict(self.shares),
            "capped": self.capped,
            "needed": self.needed,
        }


def bottleneck(seen: Observation) -> Bottleneck | None:
    """Return the bottleneck of a step; ``None`` if nothing was decoded, or in no time."""
    if not (seen.decode_seconds > 0 and seen.decode_steps):
        return None
    slots = (seen.rows or len(seen.finished) + len(seen.parked)) * seen.decode_steps
    full = min(1.0, seen.tokens / slots) if slots else 1.0
    phases = _overlapping(seen) if seen.lookahead else _in_turn(seen)
    lost = phases.decode * (1 - full)
    at_cap = seen.capped > 0 and seen.decode_steps >= max(seen.finished, default=0)
    parts: dict[StepPart, float] = {
        "decode": phases.decode - lost,
        "tail": 0.0 if at_cap else lost,
        "cap": lost if at_cap else 0.0,
        "score": phases.score,
        "train": phases.train,
    }
    total = phases.decode + phases.score + phases.train
    decode, busy, rest = seen.decode_seconds * full, phases.busy, seen.rest_seconds
    least = max(decode, busy, rest) if seen.lookahead else max(decode, busy) + rest
    return Bottleneck(
        total,
        {part: seconds / total for part, seconds in parts.items()},
        limit=max(1.0, total / least) if least > 0 else 1.0,
        scoring=_slowest(seen).busy / seen.decode_seconds,
        capped=float(seen.capped),
        finished=float(len(seen.finished)),
    )


@dataclass(frozen=True, slots=True)
class _Phases:
    """A step's seconds by phase; ``busy``: of the slowest scorer."""

    decode: float
    score: float
    train: float
    busy: float


def _slowest(seen: Observation) -> Scoring:
    return max(seen.scoring, key=lambda scoring: scoring.busy, default=Scoring("", 0.0, 0.0))


def _in_turn(seen: Observation) -> _Phases:
    """Divide the time of a step beside which no other is alive."""
    decode, rest, slowest = seen.decode_seconds, seen.rest_seconds, _slowest(seen)
    waited = max(0.0, seen.seconds - decode - rest)
    busy = min(slowest.busy, decode + waited)
    paced = min(slowest.before, decode) if busy >= decode else 0.0
    return _Phases(decode - paced, waited + paced, rest, busy)


def _overlapping(seen: Observation) -> _Phases:
    """Divide the time between the ends of two steps that are alive together."""
    slowest = _slowest(seen)
    whole: dict[str, float] = {"decode": seen.decode_seconds, "score": slowest.busy, "train": seen.rest_seconds}
    longest = max(whole, key=lambda phase: whole[phase])
    left = max(0.0, seen.seconds - whole[longest])
    others = {**whole, "score": slowest.after, longest: 0.0}
    waited = math.fsum(others.values())
    parts = {phase: left * (others[phase] / waited) if waited else 0.0 for phase in whole}
    parts[longest] = whole[longest] + (0.0 if waited else left)
    return _Phases(parts["decode"], parts["score"], parts["train"], slowest.busy)


def together(steps: Sequence[Bottleneck]) -> Bottleneck | None:
    """Return the bottleneck of several steps together, weighted by their seconds; ``None`` without any time."""
    total = math.fsum(each.seconds for each in steps)
    if not total > 0:
        return None
    parts = {part: math.fsum(each.seconds * each.shares[part] for each in steps) for part in PARTS}
    return Bottleneck(
        total,
        {part: seconds / total for part, seconds in parts.items()},
        limit=max(1.0, total / math.fsum(each.seconds / each.limit for each in steps)),
        scoring=math.fsum(each.seconds * each.scoring for each in steps) / total,
        capped=math.fsum(each.capped for each in steps) / len(steps),
        finished=math.fsum(each.finished for each in steps) / len(steps),
    )
