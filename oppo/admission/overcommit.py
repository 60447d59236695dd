"""How many units are in flight beyond a batch: fixed, or set by controllers; tail batching, continuous batching."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Literal, TypeAlias, cast

import numpy as np
from annotated_types import Ge, Le

from oppo.admission.forecast import FloatVector, cut_intervals, kaplan_meier, pace
from oppo.admission.protocol import AdmitView, CutView, Json, Observation, RefillView
from oppo.declared import NonNegative, PositiveCount, validated
from oppo.errors import AdmissionError


@dataclass(frozen=True, slots=True)
@validated(AdmissionError)
class Overcommit:
    """Keeps ``overcommit`` units in flight beyond the batch and defers the stragglers (inter-step overlap).

    Attributes:
        batch: units in a full batch.
        overcommit: Delta, the units in flight beyond it; 0 is strictly on-policy.
        max_deferrals: the cut waits for units of this age.

    Raises:
        AdmissionError: ``batch`` < 1, ``overcommit`` outside 0 .. batch, or ``max_deferrals`` < 1.
    """

    batch: PositiveCount
    overcommit: int = 0
    max_deferrals: PositiveCount = 2

    def __post_init__(self) -> None:
        if not 0 <= self.overcommit <= self.batch:
            raise AdmissionError(
                f"overcommit must lie in 0 .. batch = {self.batch}, not {self.overcommit}: with more, the units that "
                "may not be deferred again would not fit in one batch"
            )

    def admit(self, view: AdmitView) -> int:
        """Fill up to ``batch + overcommit``; 0 if more than that is deferred."""
        return max(0, self.batch + self.overcommit - view.deferred)

    def cut(self, view: CutView) -> bool:
        """Stop once the batch is full and no overdue unit is decoding."""
        return view.placed >= self.batch and not view.overdue

    def observe(self, seen: Observation) -> None:
        pass

    def metrics(self) -> Mapping[str, float]:
        return {"deferral/overcommit": float(self.overcommit)}


class AdaptiveOvercommit:
    """An overcommit whose ``overcommit`` a controller sets anew for each step, by replacing ``_current``."""

    _current: Overcommit

    @property
    def overcommit(self) -> int:
        return self._current.overcommit

    def admit(self, view: AdmitView) -> int:
        return self._current.admit(view)

    def cut(self, view: CutView) -> bool:
        return self._current.cut(view)

    def metrics(self) -> Mapping[str, float]:
        return self._current.metrics()


def Synchronous(batch: int) -> Overcommit:  # noqa: N802 - reads as the policy it returns
    """Return the admission that waits for every response of its batch: strictly on-policy, none deferred."""
    return Overcommit(batch=batch, overcommit=0)


@dataclass(frozen=True, slots=True)
@validated(AdmissionError)
class TailBatched:
    """Short rounds that discard their tail, and long rounds of discarded units only (RollPacker, arXiv 2509.21009).

    A short round launches ``launch * batch`` units, trains the first ``batch`` complete ones and discards the others.
    When a whole batch is waiting, a long round restarts it with the current weights and waits for all of it. So every
    token is trained by the weights that made it, at the price of the discarded tokens (``deferral/discarded_tokens``)
    and of a mean length that swings between short batches and a long one. Every prompt is trained exactly once: near
    the end of the run, or of the data, waiting units fill up the rounds.

    Attributes:
        batch: units in a full batch.
        launch: units launched in a short round, in batches.

    Raises:
        AdmissionError: ``batch`` < 1, or ``launch`` outside 1 .. 2.

    Example:
        >>> TailBatched(batch=64).admit(AdmitView(deferred=10, oldest=1, remaining=9))
        80
    """

    batch: PositiveCount
    launch: Annotated[float, Ge(1), Le(2)] = 1.25

    @property
    def max_deferrals(self) -> int:
        """No bound: waiting units have no tokens that could become stale."""
        return sys.maxsize

    def admit(self, view: AdmitView) -> int:
        """Launch a short round, unless a whole batch waits for a long one."""
        return 0 if view.deferred >= self.batch else math.ceil(self.launch * self.batch)

    @property
    def restarts(self) -> Literal[True]:
        return True

    def cut(self, view: CutView) -> bool:
        return view.placed >= self.batch

    def observe(self, seen: Observation) -> None:
        pass


@dataclass(frozen=True, slots=True)
class Continuous(Overcommit):
    """Keeps ``overcommit`` units decoding: new ones join whenever some are completed.

    So a decode step has all its rows until the cut, and a batch has the units that are completed first, of whatever
    step. The others are deferred: up to ``overcommit``, with a mean staleness of about overcommit / batch steps. With
    lookahead and weights that are synced in flight this is PipelineRL (arXiv 2509.19128), but every prompt is
    trained once, and no token is more than ``max_deferrals`` + lookahead updates old.

    Attributes:
        overcommit: the units that are decoded at a time, and the most that are deferred.

    Raises:
        AdmissionError: ``batch`` < 1, ``overcommit`` outside 1 .. batch, or ``max_deferrals`` < 1.

    Example:
        >>> Continuous(batch=64, overcommit=32).refill(RefillView(placed=10, decoding=30, unplaced=30))
        2
    """

    def __post_init__(self) -> None:
        Overcommit.__post_init__(self)
        if self.overcommit < 1:
            raise AdmissionError(f"overcommit units are decoded at a time: expected at least 1, not {self.overcommit}")

    def admit(self, view: AdmitView) -> int:
        """Begin with ``overcommit`` units that decode, the deferred ones included."""
        return max(0, self.overcommit - (view.deferred - view.complete))

    def refill(self, view: RefillView) -> int:
        """Keep ``overcommit`` units decoding, unless the batch and ``overcommit`` more belong to the step already."""
        room = self.batch + self.overcommit - view.placed - view.unplaced
        return max(0, min(self.overcommit - view.decoding, room))


SlopeRule: TypeAlias = Literal["text", "algorithm1"]


@dataclass
@validated(AdmissionError)
class SlopeAdaptive(AdaptiveOvercommit):
    """Raises ``overcommit`` while the mean score rises and lowers it while it does not (OPPO, arXiv 2509.25762).

    With ``R_i`` the mean score of step i and w = ``window``::

        s_t = 1/w * sum over the last w steps of (R_i - R_{i-1})
        text:        overcommit + 1 if s_t > 0 else overcommit - 1                    (the paper's section on the
            method)
        algorithm1:  overcommit + k if s_t > 0 else overcommit - k,  k = max(1, overcommit // 4)  (its Algorithm 1)

    bounded by ``least`` and ``most``. Both rules follow the paper, with their weakness: the sum telescopes to
    ``(R_t - R_{t-w}) / w``, so two noisy scores decide and the w - 1 between them do not count. On a noisy plateau both
    directions are equally likely, and ``overcommit`` wanders around the middle of its range instead of decaying. The
    rules ignore time, so they accept staleness where deferral gains nothing. :class:`oppo.admission.TailAdaptive` is
    the robust controller.

    Attributes:
        batch: units in a full batch.
        rule: one of the two.
        least, most: bounds of ``overcommit``; the paper's are often 0 and 8.
        window: steps of the slope; ``overcommit`` stays until there are as many.
        initial: the first ``overcommit``; ``None`` for the middle of the range.
        max_deferrals: the cut waits for units of this age.

    Raises:
        AdmissionError: ``least <= initial <= most <= batch`` does not hold, or ``window`` or ``max_deferrals`` < 1.

    Example:
        >>> rising = SlopeAdaptive(batch=16, window=2)
        >>> for step in range(4):
        ...     rising.observe(Observation(step, score=float(step)))
        >>> rising.overcommit
        6
    """

    batch: PositiveCount
    rule: SlopeRule = "text"
    least: int = 0
    most: int = 8
    window: PositiveCount = 10
    initial: int | None = None
    max_deferrals: PositiveCount = 2
    _current: Overcommit = field(init=False, repr=False)
    _scores: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        first = (self.least + self.most) // 2 if self.initial is None else self.initial
        if not 0 <= self.least <= first <= self.most:
            raise AdmissionError(f"0 <= least <= initial <= most must hold, not 0, {self.least}, {first}, {self.most}")
        Overcommit(self.batch, self.most, self.max_deferrals)  # checks the largest overcommit
        self._current = Overcommit(self.batch, first, self.max_deferrals)

    def observe(self, seen: Observation) -> None:
        """Follow the slope; a step without a score does not count."""
        if not math.isfinite(seen.score):
            return
        self._scores = [*self._scores, seen.score][-self.window - 1 :]
        if len(self._scores) <= self.window:
            return
        rising = self._scores[-1] - self._scores[0] > 0  # the sign of the telescoped sum
        stride = 1 if self.rule == "text" else max(1, self.overcommit // 4)
        moved = self.overcommit + (stride if rising else -stride)
        self._current = replace(self._current, overcommit=min(self.most, max(self.least, moved)))

    def state_dict(self) -> dict[str, Json]:
        return {"extra": self.overcommit, "scores": list(self._scores)}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        self._current = replace(self._current, overcommit=cast("int", state["extra"]))
        self._scores = list(cast("list[float]", state["scores"]))


MARGIN = 0.0115  # costs within this share of the lowest count as equal: the precision of the estimates
RISE = 4  # `overcommit` at most doubles in a step, but may always rise by this many units


@dataclass
@validated(AdmissionError)
class TailAdaptive(AdaptiveOvercommit):
    """Chooses ``overcommit`` from a prediction of the step's time for each of its values (``docs/schedules.md``).

    From the last ``window`` steps it estimates the survival function of the lengths (Kaplan-Meier: deferred responses
    are censored), and the seconds per decode step, per token, of every scorer, and of the rest. These give, for each
    Delta, the decode steps between two cuts and the seconds of a step (:mod:`oppo.admission.forecast`).
    A mean staleness of Delta / B steps has a price in time::

        cost(Delta) = seconds(Delta) * (1 + price * Delta / B)

    It takes the least Delta whose cost is within 1.15% of the lowest: at once if that is below the current one, at
    most doubling if above. The first step defers nothing, and alone decides on the second. The search covers the whole
    curve, so a plateau before a gain (many responses at the cap) does not stop it; where a scorer or the update takes
    the time, deferral gains nothing and Delta is 0.

    Attributes:
        batch: units in a full batch.
        price: cost of a mean staleness of 1 step, as a share of the step's time.
        max_deferrals: the cut waits for units of this age.
        most: the largest ``overcommit``; ``None`` for a quarter of the batch.
        window: steps that are remembered.

    Raises:
        AdmissionError: a number is out of range.

    Example:
        >>> TailAdaptive(batch=112).metrics()
        {'deferral/overcommit': 0.0}
    """

    batch: PositiveCount
    price: NonNegative = 1.0
    max_deferrals: PositiveCount = 2
    most: int | None = None
    window: PositiveCount = 8
    _current: Overcommit = field(init=False, repr=False)
    _predicted: float | None = field(default=None, init=False, repr=False)
    _window: list[Observation] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        self._current = Overcommit(self.batch, 0, self.max_deferrals)
        Overcommit(self.batch, self._limit, self.max_deferrals)

    def metrics(self) -> Mapping[str, float]:
        predicted = {} if self._predicted is None else {"deferral/predicted_seconds": self._predicted}
        return {**super().metrics(), **predicted}

    def observe(self, seen: Observation) -> None:
        """Update the estimates and decide on the next step.

        A step that completed nothing, or decoded nothing or in no time, does not count.
        """
        if not seen.finished or not seen.decode_steps or not seen.decode_seconds > 0:
            return
        self._window = [*self._window, seen][-self.window :]
        seconds = self.predictions()
        chosen = self._chosen(seconds * (1 + self.price * np.arange(len(seconds)) / self.batch))
        self._current = replace(self._current, overcommit=chosen)
        self._predicted = float(seconds[chosen])

    def predictions(self) -> FloatVector:
        """Return the predicted seconds of a step for ``overcommit`` = 0, 1, .., float64."""
        finished = [length for seen in self._window for length in seen.finished]
        survival = kaplan_meier(finished, self._window[-1].deferred)
        intervals = cut_intervals(survival, self.batch, self._limit, self.max_deferrals)
        return pace(self._window, self.batch).seconds(intervals, survival.mean)

    def state_dict(self) -> dict[str, Json]:
        seen: list[Json] = [each.as_json() for each in self._window]
        return {"extra": self.overcommit, "predicted_seconds": self._predicted, "seen": seen}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        self._current = replace(self._current, overcommit=cast("int", state["extra"]))
        self._predicted = cast("float | None", state["predicted_seconds"])
        self._window = [Observation.from_json(each) for each in cast("list[dict[str, Json]]", state["seen"])]

    @property
    def _limit(self) -> int:
        return self.batch // 4 if self.most is None else self.most

    def _chosen(self, cost: FloatVector) -> int:
        # The least ``overcommit`` of nearly lowest cost, with a bounded rise above the current one.
        equal = np.flatnonzero(cost <= (1 + MARGIN) * cost.min())
        return min(int(equal[0]), self.overcommit + max(RISE, self.overcommit))
