"""What a controller is told of a step that is over: the only thing it ever learns from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TypeAlias, cast

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
"""A value as JSON has it."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How long one scorer was busy on the way to a step's batch.

    Attributes:
        stage: name of its stage.
        before: busy seconds until decoding ended.
        after: busy seconds from then until its last value of the step.
    """

    stage: str
    before: float
    after: float

    @property
    def busy(self) -> float:
        """Seconds of work in all."""
        return self.before + self.after


@dataclass(frozen=True, slots=True)
class Observation:
    """What one step showed. All seconds are on the event loop's clock; lengths are in tokens, sampled or given.

    The length of a unit is that of its longest rollout.

    Attributes:
        step: ordinal of the step, from 0.
        seconds: from the step's start to its last publish.
        decode_seconds: from the start of decoding to the cut; 0 where nothing had to be decoded.
        decode_steps: the most tokens that any rollout gained: how often the model was asked for a next token.
        tokens: the tokens that all rollouts gained together.
        rows: rollouts that were being decoded at first; 0 where nobody counted them: one for each unit.
        finished: lengths of the units that were completed, trained in this step or not.
        capped: how many of those ended at the length cap.
        parked: lengths so far of the units that were not completed.
        scoring: what each scorer did, by stage.
        rest_seconds: what is left of ``seconds`` without decoding and the scoring that was waited for.
        score: mean of the scores of the rollouts that were trained; NaN when there are none.
        mismatch_kl: nats a token between the weights that sampled and those that were trained; ``None`` if not
            measured.
        effective_samples: effective sample size of the importance weights, as a part of all, 0 to 1; likewise.

    Example:
        >>> seen = Observation(step=3, seconds=9.5, finished=(12, 40), scoring=(Scoring("reward", 2.0, 0.5),))
        >>> Observation.from_json(seen.as_json()) == seen
        True
    """

    step: int
    seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    tokens: int = 0
    rows: int = 0
    finished: tuple[int, ...] = ()
    capped: int = 0
    parked: tuple[int, ...] = ()
    scoring: tuple[Scoring, ...] = ()
    rest_seconds: float = 0.0
    score: float = float("nan")
    mismatch_kl: float | None = None
    effective_samples: float | None = None

    def as_json(self) -> dict[str, Json]:
        """Return this as JSON values, for a journal or a checkpoint; a score that is not finite is ``None`` there."""
        fields = asdict(self)
        lists = {"finished": list(self.finished), "parked": list(self.parked), "scoring": list(fields["scoring"])}
        return {**fields, **lists, "score": self.score if math.isfinite(self.score) else None}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Observation:
        """Return the observation of which :meth:`as_json` made ``value``."""
        scoring = cast("list[tuple[str, float, float]]", [tuple(each.values()) for each in _dicts(value["scoring"])])
        return cls(
            step=cast("int", value["step"]),
            seconds=cast("float", value["seconds"]),
            decode_seconds=cast("float", value["decode_seconds"]),
            decode_steps=cast("int", value["decode_steps"]),
            tokens=cast("int", value["tokens"]),
            rows=cast("int", value["rows"]),
            finished=tuple(cast("list[int]", value["finished"])),
            capped=cast("int", value["capped"]),
            parked=tuple(cast("list[int]", value["parked"])),
            scoring=tuple(Scoring(*each) for each in scoring),
            rest_seconds=cast("float", value["rest_seconds"]),
            score=math.nan if value["score"] is None else cast("float", value["score"]),
            mismatch_kl=cast("float | None", value["mismatch_kl"]),
            effective_samples=cast("float | None", value["effective_samples"]),
        )


def _dicts(value: Json) -> list[dict[str, Json]]:
    return cast("list[dict[str, Json]]", value)
