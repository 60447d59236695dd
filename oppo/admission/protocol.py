"""What the stages ask of an admission policy, and what it may offer besides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

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


@dataclass(frozen=True, slots=True)
class RestartView:
    """What an admission that restarts sees when a step's new units are known.

    Attributes:
        waiting: units that were given up in earlier steps.
        new: units that enter in this step; fewer than asked for where the data has ended.
    """

    waiting: int
    new: int


@runtime_checkable
class Restarting(Protocol):
    """An admission that gives up, at the cut, what has no place in the batch, and begins it anew later.

    A unit keeps its admission number, so that its tokens are drawn with the same noise, by the weights of that time.
    """

    def restart(self, view: RestartView) -> int:
        """Return how many of the waiting units begin anew in this step; the oldest do."""


@runtime_checkable
class Telling(Protocol):
    """A controller that says what it has decided, and why."""

    def figures(self) -> Mapping[str, float]:
        """Return what of the decision for the step at hand belongs among its metrics, by their names there."""
