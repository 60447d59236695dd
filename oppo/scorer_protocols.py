"""What a scorer may be beside a :class:`oppo.models.Scorer`; each is found by its members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable


@runtime_checkable
class ConcurrentScorer(Protocol):
    """A scorer whose calls may overlap: of rollouts that finish later, while those of earlier ones go on."""

    @property
    def concurrent(self) -> bool:
        """Whether they may; read once, before the first step."""


@runtime_checkable
class ReportsSamples(Protocol):
    """A scorer that measures each rollout."""

    def samples(self) -> Mapping[str, Sequence[float]]:
        """Return what it measured since the last call, by metric; the mean over a step is the metric of that step."""


@runtime_checkable
class ServesCalls(Protocol):
    """A scorer with calls that may take long, and with something to end."""

    @property
    def at_work(self) -> str:
        """The names of the calls in progress; empty without one."""

    def close(self) -> None:
        """End what it has started; idempotent."""
