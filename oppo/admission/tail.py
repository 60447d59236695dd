"""The default controller of overcommit: it defers as much as saves time at the price of the lag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np

from oppo.admission.interval import cut_intervals
from oppo.admission.observation import Json, Observation
from oppo.admission.overcommit import Overcommit
from oppo.admission.pace import pace
from oppo.admission.protocol import AdmitView, CutView
from oppo.admission.survival import FloatVector, kaplan_meier
from oppo.declared import require_declared
from oppo.errors import AdmissionError

MARGIN = 0.0115
"""Costs within this part of the lowest count as equal: the estimates are not better than that."""

RISE = 4
"""``extra`` at most doubles in a step, but may always rise by this many units."""


@dataclass
class TailAdaptive:
    """Chooses ``extra`` from a prediction of the step's time for each of its values (``docs/controllers.md``).

    From the last ``window`` steps it estimates the survival function of the lengths (Kaplan-Meier: parked responses
    are censored), the seconds for each decode step and each token, what every scorer needs, and the rest. From these
    follow, for each Delta, the decode steps between two cuts (:mod:`oppo.admission.interval`) and the seconds of a
    step (:mod:`oppo.admission.pace`). A mean lag of Delta / B steps is priced in time::

        cost(Delta) = seconds(Delta) * (1 + price * brake * Delta / B)
        brake       = max(1, mismatch KL / kl_target, ess_target / effective sample size)

    and the least Delta is taken whose cost is within 1.15 % of the lowest: at once if it is less than the present one,
    at most doubling if it is more. The first step defers nothing; it is all that the second one is decided by. Because
    all of the curve is looked at, a plateau before a gain (many responses at the cap) does not stop it, and where a
    scorer or the update takes the time it defers nothing: nothing is gained.

    Attributes:
        batch: units in a full batch.
        price: what a mean lag of 1 step costs, in parts of the step's time.
        max_deferrals: the cut waits for units of this age.
        most: the largest ``extra``; a quarter of the batch unless given.
        window: steps that are remembered.
        kl_target: nats a token between the weights that sampled and those that are trained, above which the price
            rises; not looked at when ``None``.
        ess_target: effective sample size, as a part of all, below which the price rises; likewise.

    Raises:
        AdmissionError: a number is out of range.

    Example:
        >>> TailAdaptive(batch=112).metrics()
        {'deferral/extra': 0.0}
    """

    batch: int
    price: float = 1.0
    max_deferrals: int = 2
    most: int | None = None
    window: int = 8
    kl_target: float | None = None
    ess_target: float | None = None
    _now: Overcommit = field(init=False, repr=False)
    _predicted: float | None = field(default=None, init=False, repr=False)
    _seen: list[Observation] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        require_declared(self, error=AdmissionError)
        self._now = Overcommit(self.batch, 0, self.max_deferrals)
        Overcommit(self.batch, self._limit, self.max_deferrals)
        if self.window < 1:
            raise AdmissionError(f"window must be at least 1 step, not {self.window}")
        for name, value in (("kl_target", self.kl_target), ("ess_target", self.ess_target)):
            if value is not None and not value > 0:
                raise AdmissionError(f"{name} must be more than 0, not {value}")
        if not self.price >= 0:
            raise AdmissionError(f"price must be 0 or more, not {self.price}")

    @property
    def extra(self) -> int:
        """Delta of the step to come."""
        return self._now.extra

    @property
    def predicted_seconds(self) -> float | None:
        """How long the step to come should take, in the mean of many like it; ``None`` for the first."""
        return self._predicted

    def admit(self, view: AdmitView) -> int:
        """Fill up to ``batch + extra``."""
        return self._now.admit(view)

    def cut(self, view: CutView) -> bool:
        """Stop once the batch is full and nobody overdue is still decoding."""
        return self._now.cut(view)

    def metrics(self) -> Mapping[str, float]:
        """Return the extra units of the step at hand, and how long it should take."""
        if self._predicted is None:
            return self._now.metrics()
        return {**self._now.metrics(), "deferral/predicted_seconds": self._predicted}

    def observe(self, seen: Observation) -> None:
        """Take a step into account, and decide on the next.

        One that only trained what was carried says nothing, nor does one of models that take no time.
        """
        if not seen.finished or not seen.decode_steps or not seen.decode_seconds > 0:
            return
        self._seen = [*self._seen, seen][-self.window :]
        seconds = self.predictions()
        chosen = self._chosen(seconds * (1 + self.price * self._brake() * np.arange(len(seconds)) / self.batch))
        self._now = replace(self._now, extra=chosen)
        self._predicted = float(seconds[chosen])

    def predictions(self) -> FloatVector:
        """Return the predicted seconds of a step for ``extra`` = 0, 1, .., float64."""
        finished = [length for seen in self._seen for length in seen.finished]
        survival = kaplan_meier(finished, self._seen[-1].parked)
        intervals = cut_intervals(survival, self.batch, self._limit, self.max_deferrals)
        return pace(self._seen, self.batch).seconds(intervals, survival.mean)

    def state_dict(self) -> dict[str, Json]:
        """Return the decision that stands and the observations in the window."""
        seen: list[Json] = [each.as_json() for each in self._seen]
        return {"extra": self.extra, "predicted_seconds": self._predicted, "seen": seen}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._now = replace(self._now, extra=cast("int", state["extra"]))
        self._predicted = cast("float | None", state["predicted_seconds"])
        self._seen = [Observation.from_json(each) for each in cast("list[dict[str, Json]]", state["seen"])]

    @property
    def _limit(self) -> int:
        return self.batch // 4 if self.most is None else self.most

    def _brake(self) -> float:
        """Return the factor by which measured staleness raises the price."""
        kl = _mean([seen.mismatch_kl for seen in self._seen])
        samples = _mean([seen.effective_samples for seen in self._seen])
        brake = 1.0
        if kl is not None and self.kl_target is not None:
            brake = max(brake, kl / self.kl_target)
        if samples is not None and self.ess_target is not None:
            brake = max(brake, self.ess_target / samples)
        return brake

    def _chosen(self, cost: FloatVector) -> int:
        """Return the least ``extra`` that is as good as the best, but not too far above the present one."""
        equal = np.flatnonzero(cost <= (1 + MARGIN) * cost.min())
        return min(int(equal[0]), self.extra + max(RISE, self.extra))


def _mean(measured: Sequence[float | None]) -> float | None:
    known = [value for value in measured if value is not None]
    return float(np.mean(known)) if known else None
