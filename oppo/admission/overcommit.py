"""Overcommit: a number of units in flight beyond the batch, fixed or set by a controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oppo.admission.observation import Observation
from oppo.admission.protocol import AdmitView, CutView
from oppo.declared import require_declared
from oppo.errors import AdmissionError


@dataclass(frozen=True, slots=True)
class Overcommit:
    """Keeps ``extra`` units in flight beyond the batch and carries the stragglers (inter-step overlap).

    Attributes:
        batch: units in a full batch.
        extra: Delta, the units in flight beyond it; 0 is strictly on-policy.
        max_deferrals: the cut waits for units of this age.

    Raises:
        AdmissionError: ``batch`` < 1, ``extra`` outside 0 .. batch, or ``max_deferrals`` < 1.
    """

    batch: int
    extra: int = 0
    max_deferrals: int = 2

    def __post_init__(self) -> None:
        require_declared(self, error=AdmissionError)
        if self.batch < 1:
            raise AdmissionError(f"batch must be at least 1, not {self.batch}")
        if not 0 <= self.extra <= self.batch:
            raise AdmissionError(
                f"extra must lie in 0 .. batch = {self.batch}, not {self.extra}: with more, the units that may not be "
                "deferred again would not fit in one batch"
            )
        if self.max_deferrals < 1:
            raise AdmissionError(f"max_deferrals must be at least 1, not {self.max_deferrals}; extra=0 defers nothing")

    def admit(self, view: AdmitView) -> int:
        """Fill up to ``batch + extra``; 0 if more than that is carried."""
        return max(0, self.batch + self.extra - view.carried)

    def cut(self, view: CutView) -> bool:
        """Stop once the batch is full and no overdue unit is decoding."""
        return view.placed >= self.batch and not view.overdue

    def observe(self, seen: Observation) -> None:
        """Learn nothing."""

    def metrics(self) -> Mapping[str, float]:
        """Return the extra units of the coming step."""
        return {"deferral/extra": float(self.extra)}


class AdaptiveOvercommit:
    """An overcommit whose ``extra`` a controller sets anew for each step, by replacing ``_current``."""

    _current: Overcommit

    @property
    def extra(self) -> int:
        """Delta of the coming step."""
        return self._current.extra

    def admit(self, view: AdmitView) -> int:
        """Fill up to ``batch + extra``."""
        return self._current.admit(view)

    def cut(self, view: CutView) -> bool:
        """Stop once the batch is full and no overdue unit is decoding."""
        return self._current.cut(view)

    def metrics(self) -> Mapping[str, float]:
        """Return the extra units of the coming step."""
        return self._current.metrics()


def Synchronous(batch: int) -> Overcommit:  # noqa: N802 - reads as the policy it returns
    """Return the admission that waits for every response of its batch: strictly on-policy, none deferred."""
    return Overcommit(batch=batch, extra=0)
