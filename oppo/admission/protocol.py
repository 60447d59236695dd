"""What the stages ask of an admission policy, and what it may offer besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from oppo.admission.observation import Observation


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

    def observe(self, seen: Observation) -> None:
        """Learn from a step that is over."""


@runtime_checkable
class Restarting(Protocol):
    """An admission that gives up, at the cut, what has no place in the batch, and begins it anew later.

    A step with fewer new units than the batch is filled up with those that were given up, the oldest first. A unit
    keeps its admission number, so that its tokens are drawn with the same noise, by the weights of that time.
    """

    @property
    def restarts(self) -> Literal[True]:
        """Always true: it is there to tell such an admission from the others."""


@runtime_checkable
class Measured(Protocol):
    """A controller whose decisions are among the metrics of a step."""

    def metrics(self) -> Mapping[str, float]:
        """Return the decision for the step at hand, and its reasons, by the names of metrics."""
