"""Overcommit, fixed or as a controller sets it (:class:`AdaptiveOvercommit`), tail batching, continuous batching."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from annotated_types import Ge, Le

from oppo.admission.protocol import AdmitView, CutView, Observation, RefillView
from oppo.declared import PositiveCount, validated
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
