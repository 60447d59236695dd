"""The protocol of an admission policy, and its optional parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from oppo.admission.observation import Observation


@dataclass(frozen=True, slots=True)
class AdmitView:
    """The state at the start of a step.

    Attributes:
        carried: units carried into this step, unfinished or finished.
        oldest: age of the oldest of them, in steps; 0 without any.
        remaining: steps left to train in, this one included.
        complete: how many of them are finished.
    """

    carried: int
    oldest: int
    remaining: int
    complete: int = 0


@dataclass(frozen=True, slots=True)
class CutView:
    """The state between two decode steps, after a rollout has finished.

    Attributes:
        placed: complete units with a place in this step's batch.
        decoding: units still being decoded.
        overdue: those of them that may not be deferred again.
    """

    placed: int
    decoding: int
    overdue: int


@dataclass(frozen=True, slots=True)
class RefillView:
    """The state between two decode steps, when new units may join.

    Attributes:
        placed: complete units with a place in this step's batch.
        decoding: units being decoded.
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

        At most the batch and as many units as may be carried belong to a step: then no more are without a place at the
        cut, and those that may not be deferred again fit in one batch.
        """


@runtime_checkable
class Restarting(Protocol):
    """An admission that discards, at the cut, units without a place in the batch, and restarts them later.

    Discarded units, the oldest first, fill up a step with fewer new units than the batch. A restarted unit keeps its
    admission number: its tokens are drawn with the same noise, by the current weights.
    """

    @property
    def restarts(self) -> Literal[True]:
        """Always true: marks such an admission."""


@runtime_checkable
class ReportsMetrics(Protocol):
    """A controller whose decisions are among the metrics of a step."""

    def metrics(self) -> Mapping[str, float]:
        """Return the decision for the coming step, and its reasons, by metric name."""
