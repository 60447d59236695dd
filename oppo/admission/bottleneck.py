"""The bottleneck of a step: the largest part of its time, and the speed-up that each schedule could give at most.

A step's seconds T = D + E + R consist of decoding, the wait for scores after decoding, and the rest
(:class:`~oppo.admission.Observation`). The scorer that was busy longest was busy for S seconds, M of them during
decoding. Five parts follow::

    full    = tokens / (rows * decode steps)       the share of row slots in decode steps that made a token
    paced   = min(M, D) if S >= D else 0           decoding at the pace of the slowest scorer

    decode  = (D - paced) * full                   decoding with every row live
    tail    = (D - paced) * (1 - full)             decode steps of rows whose responses had ended
    score   = E + paced
    train   = R                                    the update, and everything else

The tail is called ``cap`` if a response was decoded from its first token to the length cap: deferring stragglers has
then shortened nothing. The largest part is the bottleneck. The trainer was busy for U seconds: R, and the gradient
accumulation of a streamed update before it. Each kind of schedule has a least time of a step::

    stream      max(D, S) + R                      scores are computed while responses are decoded
    defer       max(D * full, S) + R               and no row is ever empty: overcommit, tail batching
    lookahead   max(D, S, U)                       the update overlaps decoding too: lookahead, streamed updates
    limit       max(D * full, S, U)                all of them: with in-flight weight sync no row is empty between steps

The speed-up at most is T over that. The bounds are generous: a decode step of fewer rows is taken to cost as much as
one of all, as it nearly does on a GPU, and work that overlaps is taken not to slow down other work, as where decoding,
scoring and training have hardware of their own. They leave out more rows at a time (deferring more than about half a
batch, a larger batch) and other models or devices.

With lookahead the three phases of neighbouring steps overlap. The longest of D, S and U sets the pace, and its part is
all of its seconds; decode seconds are divided by ``full`` as above. For the rest of T it waited for the two others, in
proportion to their seconds: U and the scorers' after decoding, or D. To stream removes the wait for scores; to defer
removes the time by which it shortens the longest phase.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, cast, get_args

from oppo.admission.protocol import Observation, Scoring

StepPart: TypeAlias = Literal["decode", "tail", "cap", "score", "train"]  # a part of a step's time

PARTS: tuple[StepPart, ...] = get_args(StepPart)  # all parts; of equal ones the first is the largest

Schedule: TypeAlias = Literal["stream", "defer", "lookahead"]
"""A kind of schedule that shortens a step; those with less staleness first."""

SCHEDULES: tuple[Schedule, ...] = get_args(Schedule)  # all kinds
NUMBERS = ("limit", "scoring", "capped", "finished")  # the other fields of a bottleneck that are metrics
PREFIX = "bottleneck/"  # prefix of its metrics' names
LIMITS = {schedule: f"{PREFIX}limit_{schedule}" for schedule in SCHEDULES}
"""The metric of the limit of each kind of schedule."""

RESERVE = 2  # units to defer beyond the mean number that end at the cap: a step may have more
WORTHWHILE = 1.05  # a schedule that promises less is not recommended
ALIKE = 0.85  # of schedules that promise so much of what the best does, the one with the least staleness is recommended


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """The parts of the time of a step, or of some steps.

    Attributes:
        seconds: of all parts.
        shares: of each part, 0 to 1; their sum is 1.
        limit: largest speed-up by all schedules of as many rows together; 1 or more.
        limits: the same by one kind of schedule alone.
        scoring: busy time of the slowest scorer over the time of decoding.
        capped: units per step that ended at the length cap.
        finished: units per step that were completed.

    Example:
        >>> seen = Observation(0, seconds=8.0, decode_seconds=4.0, decode_steps=9, tokens=9, rows=4, rest_seconds=4.0)
        >>> bottleneck(seen).largest, bottleneck(seen).limit
        ('train', 2.0)
    """

    seconds: float
    shares: Mapping[StepPart, float]
    limit: float
    limits: Mapping[Schedule, float] = field(default_factory=lambda: dict.fromkeys(SCHEDULES, 1.0))
    scoring: float = 0.0
    capped: float = 0.0
    finished: float = 0.0

    @property
    def largest(self) -> StepPart:
        return max(PARTS, key=lambda part: self.shares[part])

    @property
    def needed(self) -> int:
        """Units to defer to shorten a step whose tail is at the cap."""
        return round(self.capped + RESERVE)

    @property
    def next_schedule(self) -> Schedule | None:
        """The kind of schedule to try next: the largest speed-up for the least staleness; ``None``: none helps."""
        best = max(self.limits.values())
        if best < WORTHWHILE:
            return None
        return next(each for each in SCHEDULES if self.limits[each] >= max(WORTHWHILE, ALIKE * best))

    @property
    def message(self) -> str:
        return f"{self.meaning}; {self.advice}"

    @property
    def meaning(self) -> str:
        share = f"{self.shares[self.largest]:.0%}"
        match self.largest:
            case "decode":
                return f"{share} of the step is decoding with every slot taken"
            case "tail":
                return f"{share} of the step is lost to slots left empty by the long tail"
            case "cap":
                return (
                    f"{share} of the step is lost while {self.capped:.2g} of {self.finished:.3g} run into the length "
                    "cap"
                )
            case "score" if self.scoring >= 1:
                return (
                    f"the slowest scorer is busy for {self.scoring:.1f} times as long as decoding, {share} of the step"
                )
            case "score":
                return f"{share} of the step waits for scores after decoding"
            case "train":
                return f"the update takes {share} of the step"

    @property
    def advice(self) -> str:
        if self.next_schedule is None:
            faster = {"score": "faster scoring", "train": "a faster update"}.get(self.largest, "a faster decode step")
            return f"only {faster} would help; no schedule makes it more than {self.limit:.1f} times as fast"
        promise = self.limits[self.next_schedule]
        own = " on hardware of its own" if self.next_schedule == "lookahead" else ""
        more = f"; all schedules together: at most {self.limit:.1f} times" if self.limit >= WORTHWHILE * promise else ""
        return f"{self._remedy(self.next_schedule)}: at most {promise:.1f} times as fast{own}{more}"

    def _remedy(self, schedule: Schedule) -> str:
        match schedule:
            case "stream":
                return "score responses while they are decoded"
            case "defer" if self.shares["cap"] > self.shares["tail"]:
                return f"defer more stragglers: fewer than reach the cap gain nothing, about {self.needed} are needed"
            case "defer":
                return "defer more stragglers"
            case "lookahead":
                return "decode during the update (one more step of lookahead, or streamed updates)"

    def as_metrics(self) -> dict[str, float]:
        """Return this as metrics of a step, all but ``seconds``."""
        parts = {PREFIX + part: share for part, share in self.shares.items()}
        limits = {LIMITS[schedule]: limit for schedule, limit in self.limits.items()}
        return parts | limits | {PREFIX + name: getattr(self, name) for name in NUMBERS}

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float | None], seconds: float) -> Bottleneck | None:
        needed = (*(PREFIX + name for name in (*PARTS, *NUMBERS)), *LIMITS.values())
        if any(metrics.get(name) is None for name in needed):
            return None
        known = cast("Mapping[str, float]", metrics)
        shares = {part: known[PREFIX + part] for part in PARTS}
        limits = {schedule: known[name] for schedule, name in LIMITS.items()}
        return cls(seconds, shares, limits=limits, **{name: known[PREFIX + name] for name in NUMBERS})


def bottleneck(seen: Observation) -> Bottleneck | None:
    """Return the bottleneck of a step; ``None`` if nothing was decoded, or in no time."""
    if not (seen.decode_seconds > 0 and seen.decode_steps):
        return None
    slots = (seen.rows or len(seen.finished) + len(seen.deferred)) * seen.decode_steps
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
    limits = {name: max(1.0, total / least) if least > 0 else 1.0 for name, least in _least(seen, phases, full).items()}
    return Bottleneck(
        total,
        {part: seconds / total for part, seconds in parts.items()},
        limit=limits.pop("all"),
        limits=cast("Mapping[Schedule, float]", limits),
        scoring=_slowest(seen).busy / seen.decode_seconds,
        capped=float(seen.capped),
        finished=float(len(seen.finished)),
    )


def _least(seen: Observation, phases: _Phases, full: float) -> dict[str, float]:
    # By kind of schedule; ``all``: by all of them together.
    decode, busy, rest, update = seen.decode_seconds, phases.busy, seen.rest_seconds, _update(seen)
    longest, least = max(decode, busy, update), max(decode * full, busy, update)
    if not seen.lookahead:
        return {
            "stream": max(decode, busy) + rest,
            "defer": max(decode * full, busy) + rest,
            "lookahead": longest,
            "all": least,
        }
    total = phases.decode + phases.score + phases.train
    return {
        "stream": total - (phases.score if busy < longest else 0.0),
        "defer": total - (longest - least),
        "lookahead": longest,
        "all": least,
    }


@dataclass(frozen=True, slots=True)
class _Phases:
    """A step's seconds by phase; ``busy``: of the slowest scorer."""

    decode: float
    score: float
    train: float
    busy: float


def _slowest(seen: Observation) -> Scoring:
    return max(seen.scoring, key=lambda scoring: scoring.busy, default=Scoring("", 0.0, 0.0))


def _update(seen: Observation) -> float:
    return seen.rest_seconds + seen.accumulate_seconds


def _in_turn(seen: Observation) -> _Phases:
    # A step beside which no other is alive.
    decode, rest, slowest = seen.decode_seconds, seen.rest_seconds, _slowest(seen)
    waited = max(0.0, seen.seconds - decode - rest)
    busy = min(slowest.busy, decode + waited)
    paced = min(slowest.before, decode) if busy >= decode else 0.0
    return _Phases(decode - paced, waited + paced, rest, busy)


def _overlapping(seen: Observation) -> _Phases:
    # The time between the ends of two steps that are alive together.
    slowest = _slowest(seen)
    whole: dict[str, float] = {"decode": seen.decode_seconds, "score": slowest.busy, "train": _update(seen)}
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
        limits={
            schedule: max(1.0, total / math.fsum(each.seconds / each.limits[schedule] for each in steps))
            for schedule in SCHEDULES
        },
        scoring=math.fsum(each.seconds * each.scoring for each in steps) / total,
        capped=math.fsum(each.capped for each in steps) / len(steps),
        finished=math.fsum(each.finished for each in steps) / len(steps),
    )
