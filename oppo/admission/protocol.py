"""The protocol of an admission policy, and the observation of a finished step that it learns from."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Literal, Protocol, TypeAlias, cast, runtime_checkable

from pydantic import AllowInfNan

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, slots=True)
class Scoring:
    """Busy time of one scorer in a step.

    Attributes:
        stage: name of its stage.
        before: busy seconds until decoding ended.
        after: busy seconds from then to its last value of the step.
        spare: seconds of its calls after that, which nothing waited for.
        calls, tokens: all its calls that read, and the tokens that they read.
        answered: rollouts for which it answered.
        answering: seconds of the calls that did.
    """

    stage: str
    before: float
    after: float
    spare: float = 0.0
    calls: int = 0
    tokens: int = 0
    answered: int = 0
    answering: float = 0.0

    @property
    def busy(self) -> float:
        return self.before + self.after


@dataclass(frozen=True, slots=True)
class Stretch:
    """Successive decode steps, up to one in which a rollout ended: their tokens and seconds.

    Attributes:
        seconds: that they took.
        steps: their number.
        tokens: that they made: the sum over the steps of the live rollouts.
        context: the sum over the steps of the tokens in these rollouts' context, prompts included.
        opened: tokens of the prompts that were read before them, to begin responses.
        resumed: tokens in the context of rollouts that were deferred and decoded on from here.
        ended: rollouts that ended in them.
    """

    seconds: float
    steps: int
    tokens: int
    context: int
    opened: int = 0
    resumed: int = 0
    ended: int = 0


@dataclass(frozen=True, slots=True)
class Observation:
    """Measurements of one step. Seconds are on the event loop's clock; lengths are in sampled tokens.

    A unit is as long as its longest rollout.

    Attributes:
        step: ordinal of the step, from 0.
        seconds: from the step's start, or the last weight sync before if that is later, to its last weight sync.
        decode_seconds: from the start of decoding to the cut; 0 without decoding.
        decode_steps: number of forward passes: the most tokens that were sampled of any rollout.
        tokens: sum of the tokens that were sampled.
        rows: rollouts decoding at the start; 0 if not counted: one for each unit.
        finished: lengths of the units completed in this step, trained or not.
        capped: how many of those ended at the length cap.
        deferred: lengths so far of the incomplete units.
        scoring: busy time of each scorer.
        rest_seconds: ``seconds`` without decoding and the wait for scores after it; with lookahead, of the update and
            weight sync alone.
        accumulate_seconds: of a streamed update, beside decoding and scoring: they are no part of ``rest_seconds``.
        score: mean score of the trained rollouts; NaN without any.
        lookahead: number of later steps that may begin before this one has ended.
        chunk: tokens in a chunk; 0 without decoding.
        stretches: what its decode steps were; some of them together.

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
    deferred: tuple[int, ...] = ()
    scoring: tuple[Scoring, ...] = ()
    rest_seconds: float = 0.0
    accumulate_seconds: float = 0.0
    score: Annotated[float, AllowInfNan(True)] = float("nan")
    lookahead: int = 0
    chunk: int = 0
    stretches: tuple[Stretch, ...] = ()

    def as_json(self) -> dict[str, Json]:
        """Return this as JSON values, for a journal or a checkpoint; a score that is not finite becomes ``None``."""
        values = asdict(self)
        lists = {name: list(values[name]) for name in ("finished", "deferred", "scoring", "stretches")}
        return {**values, **lists, "score": self.score if math.isfinite(self.score) else None}

    @classmethod
    def from_json(cls, value: Mapping[str, Json]) -> Observation:
        given = {each.name: cast("Any", value[each.name]) for each in fields(cls)}
        tuples = {
            "finished": tuple(given["finished"]),
            "deferred": tuple(given["deferred"]),
            "scoring": tuple(Scoring(**each) for each in given["scoring"]),
            "stretches": tuple(Stretch(**each) for each in given["stretches"]),
        }
        return cls(**{**given, **tuples, "score": math.nan if given["score"] is None else given["score"]})


@dataclass(frozen=True, slots=True)
class AdmitView:
    """The state at the start of a step.

    Attributes:
        deferred: units deferred into this step, unfinished or finished.
        oldest: age of the oldest of them, in steps; 0 without any.
        remaining: steps left to train in, this one included.
        complete: how many of them are finished.
    """

    deferred: int
    oldest: int
    remaining: int
    complete: int = 0


@dataclass(frozen=True, slots=True)
class CutView:
    """The state between two decode steps, after a rollout has finished.

    Attributes:
        placed: complete units with a place in this step's batch.
        decoding: units still being decoded, or of agents that may go on.
        overdue: decoding units that may not be deferred again.
    """

    placed: int
    decoding: int
    overdue: int


@dataclass(frozen=True, slots=True)
class RefillView:
    """The state between two decode steps, when new units may join.

    Attributes:
        placed: complete units with a place in this step's batch.
        decoding: units being decoded, or of agents that may go on.
        unplaced: units without a place, those included and complete ones.
    """

    placed: int
    decoding: int
    unplaced: int


class Admission(Protocol):
    """Decides what enters a step and when it is cut."""

    @property
    def batch(self) -> int:
        """Units in a full batch."""

    @property
    def max_deferrals(self) -> int:
        """Age at which a unit may not be deferred again."""

    def admit(self, view: AdmitView) -> int:
        """Return how many new units enter; called once, at a step's start."""

    def cut(self, view: CutView) -> bool:
        """Return whether decoding stops now."""

    def observe(self, seen: Observation) -> None:
        """Learn from a finished step."""


@runtime_checkable
class Refilling(Protocol):
    """An admission that lets new units join a step while it is decoded."""

    def refill(self, view: RefillView) -> int:
        """Return how many new units join now; called at the start of decoding and whenever units were completed.

        At most the batch and as many units as may be deferred belong to a step: then no more are without a place at the
        cut, and those that may not be deferred again fit in one batch.
        """


@runtime_checkable
class Restarting(Protocol):
    """An admission that discards, at the cut, units without a place in the batch, and restarts them later.

    Discarded units, the oldest first, fill up a step with fewer new units than the batch. A restarted unit keeps its
    admission number: its tokens are sampled with the same noise, by the current weights.
    """

    @property
    def restarts(self) -> Literal[True]:
        """Always true: marks such an admission."""


@runtime_checkable
class ReportsMetrics(Protocol):
    """A controller whose decisions are among the metrics of a step."""

    def metrics(self) -> Mapping[str, float]:
        """Return the decision for the coming step, and its reasons, by metric name."""
