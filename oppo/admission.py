"""Admission: how many prompts enter a step, and when a step is cut. Pure policies: no I/O, no clock, no torch.

All counts are in *units*: a rollout, or a whole group of rollouts where they are compared with one another.

With ``batch`` = B and at most ``extra`` = Delta units beyond it, at most Delta are carried into the next step; the
cut waits for units of age ``max_deferrals``; since ``extra <= batch``, all of those fit in one batch. So a unit's age
when it is trained is at most ``max_deferrals``: a theorem, tested as a property in ``tests/test_admission.py``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from oppo.errors import AdmissionError
from oppo.events import StepReport


@dataclass(frozen=True, slots=True)
class AdmitView:
    """What admission sees at the start of a step.

    Attributes:
        carried: units carried into this step, unfinished or finished.
        oldest: age of the oldest of them, in steps; 0 when nothing is carried.
        remaining: steps left to train in, this one included.
    """

    carried: int
    oldest: int
    remaining: int


@dataclass(frozen=True, slots=True)
class CutView:
    """What admission sees between two decode steps, whenever something has finished.

    Attributes:
        placed: units that are complete and have a place in this step's batch.
        decoding: units still being decoded.
        overdue: those of them that may not be deferred once more.
    """

    placed: int
    decoding: int
    overdue: int


class Admission(Protocol):
    """Decides what enters a step and when it is cut."""

    @property
    def batch(self) -> int:
        """Units in a full batch."""

    @property
    def max_deferrals(self) -> int:
        """Age at which a unit may not be deferred once more."""

    def admit(self, view: AdmitView) -> int:
        """Return how many new units should enter, asked once at a step's start."""

    def cut(self, view: CutView) -> bool:
        """Return whether decoding stops now."""

    def observe(self, report: StepReport) -> None:
        """Learn from a step that is over."""


@dataclass(frozen=True, slots=True)
class Overcommit:
    """Keeps ``extra`` units in flight beyond the batch and carries the stragglers (inter-step overlap).

    Attributes:
        batch: units in a full batch.
        extra: Delta, units in flight beyond it; 0 is strictly on-policy.
        max_deferrals: the cut waits for units of this age.

    Raises:
        AdmissionError: ``batch`` < 1, ``extra`` outside 0 .. batch, or ``max_deferrals`` < 1.
    """

    batch: int
    extra: int = 0
    max_deferrals: int = 2

    def __post_init__(self) -> None:
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
        """Fill up to ``batch + extra``."""
        return self.batch + self.extra - view.carried

    def cut(self, view: CutView) -> bool:
        """Stop once the batch is full and nobody overdue is still decoding."""
        return view.placed >= self.batch and not view.overdue

    def observe(self, report: StepReport) -> None:
        """Learn nothing."""


def Synchronous(batch: int) -> Overcommit:  # noqa: N802 - reads as the policy it returns
    """Return the admission that waits for every response of its batch: strictly on-policy, nothing deferred."""
    return Overcommit(batch=batch, extra=0)
