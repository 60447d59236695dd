"""The bottleneck of a step: what its time went to, which of that no schedule can save, and so what would help.

A step's seconds are divided into five parts. D are its seconds of decoding, E those in which scores were waited for
when decoding had ended, R the rest (:class:`~oppo.admission.Observation`), so that T = D + E + R. Of its scorers, the
one that was busy longest was so for S seconds, M of them while something was decoded::

    full    = tokens / (rows * decode steps)       the part of the places in decode steps that made a token
    paced   = min(M, D) if S >= D else 0           decoding that was no faster than a scorer followed

    decode  = (D - paced) * full                   decoding with every place taken
    tail    = (D - paced) * (1 - full)             decode steps for places whose responses had ended
    score   = E + paced
    train   = R                                    the update, and all that is neither of these

where the tail is called ``cap`` if a response was decoded from its first token to the length cap: carrying stragglers
has then shortened nothing. The largest part is the bottleneck. What remains where everything overlaps that can, and
carrying leaves no place empty, is

    least   = max(D * full, S) + R                 so  limit = T / least

times as fast. It is generous: a decode step of fewer rows is taken to cost as much as one of all, as it nearly does on
a GPU. It counts on neither faster models nor steps that overlap one another, nor on more rows at a time: whoever
carries more than about half a batch has so many more of them that decoding can take less than that.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, cast, get_args

from oppo.admission.observation import Observation

Part: TypeAlias = Literal["decode", "tail", "cap", "score", "train"]
"""What a step's time mostly went to."""

PARTS: tuple[Part, ...] = get_args(Part)
"""All of them; of equal parts the first counts."""

PREFIX = "bottleneck/"
"""Of the names that a bottleneck has among a step's metrics."""

RESERVE = 2
"""Units to be carried beyond those that end at the cap, since a step may have more of them than the mean."""


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """What the time of a step, or of some steps, went to.

    Attributes:
        seconds: that are divided.
        shares: the parts, from 0 to 1; together 1.
        limit: how many times as fast any overlap and any deferral of as many rows could make it; 1 or more.
        scoring: how many times as long as decoding the slowest scorer was busy.
        capped: units of a step that ended at the length cap.
        finished: units of a step that were completed.

    Example:
        >>> seen = Observation(0, seconds=8.0, decode_seconds=4.0, decode_steps=9, tokens=9, rows=4, rest_seconds=4.0)
        >>> bottleneck(seen).largest, bottleneck(seen).limit
        ('train', 1.6)
    """

    seconds: float
    shares: Mapping[Part, float]
    limit: float
    scoring: float = 0.0
    capped: float = 0.0
    finished: float = 0.0

    @property
    def largest(self) -> Part:
        """The largest part."""
        return max(PARTS, key=lambda part: self.shares[part])

    @property
    def needed(self) -> int:
        """Units to be carried before that shortens steps whose tail sits at the cap."""
        return round(self.capped + RESERVE)

    @property
    def sentence(self) -> str:
        """What the bottleneck means, what would help, and how much at most."""
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
                return f"{share} of the step waits for scores of what is decoded: score it while it is written"
            case "train":
                return f"the update takes {share} of the step: no schedule shortens that"

    def as_metrics(self) -> dict[str, float]:
        """Return this as a step's metrics have it; its seconds are the step's own."""
        more = {"limit": self.limit, "scoring": self.scoring, "capped": self.capped, "finished": self.finished}
        parts = {PREFIX + part: share for part, share in self.shares.items()}
        return parts | {PREFIX + name: value for name, value in more.items()}

    @classmethod
    def of_metrics(cls, metrics: Mapping[str, float | None], seconds: float) -> Bottleneck | None:
        """Return the one of which :meth:`as_metrics` is among ``metrics``, if it is."""
        if any(metrics.get(PREFIX + name) is None for name in (*PARTS, "limit", "scoring", "capped", "finished")):
            return None
        known = cast("Mapping[str, float]", metrics)
        return cls(
            seconds,
            {part: known[PREFIX + part] for part in PARTS},
            limit=known[PREFIX + "limit"],
            scoring=known[PREFIX + "scoring"],
            capped=known[PREFIX + "capped"],
            finished=known[PREFIX + "finished"],
        )

    def as_json(self) -> dict[str, object]:
        """Return this for a reader of JSON, with the words."""
        said = {"bottleneck": self.largest, "sentence": self.sentence, "limit": self.limit}
        return {**said, "shares": dict(self.shares), "capped": self.capped, "needed": self.needed}


def bottleneck(seen: Observation) -> Bottleneck | None:
    """Return the bottleneck of a step; ``None`` where nothing was decoded, or no time passed meanwhile."""
    decode, rest = seen.decode_seconds, seen.rest_seconds
    if not (decode > 0 and seen.decode_steps):
        return None
    waited = max(0.0, seen.seconds - decode - rest)
    slowest = max(seen.scoring, key=lambda scoring: scoring.busy, default=None)
    busy = min(slowest.busy, decode + waited) if slowest else 0.0
    paced = min(slowest.before, decode) if slowest and busy >= decode else 0.0
    places = (seen.rows or len(seen.finished) + len(seen.parked)) * seen.decode_steps
    full = min(1.0, seen.tokens / places) if places else 1.0
    lost = (decode - paced) * (1 - full)
    at_cap = seen.capped > 0 and seen.decode_steps >= max(seen.finished, default=0)
    total = decode + waited + rest
    parts: dict[Part, float] = {
        "decode": decode - paced - lost,
        "tail": 0.0 if at_cap else lost,
        "cap": lost if at_cap else 0.0,
        "score": waited + paced,
        "train": rest,
    }
    least = max(decode * full, busy) + rest
    return Bottleneck(
        total,
        {part: seconds / total for part, seconds in parts.items()},
        limit=max(1.0, total / least) if least > 0 else 1.0,
        scoring=slowest.busy / decode if slowest else 0.0,
        capped=float(seen.capped),
        finished=float(len(seen.finished)),
    )


def together(steps: Sequence[Bottleneck]) -> Bottleneck | None:
    """Return the bottleneck of all of these steps as one: each second counts as much; ``None`` if there is none."""
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
