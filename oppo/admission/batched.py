"""Tail batching: strictly on-policy, yet few steps wait for the longest responses."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import Literal

from oppo.admission.observation import Observation
from oppo.admission.protocol import AdmitView, CutView
from oppo.declared import require_declared
from oppo.errors import AdmissionError


@dataclass(frozen=True, slots=True)
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
        >>> TailBatched(batch=64).admit(AdmitView(carried=10, oldest=1, remaining=9))
        80
    """

    batch: int
    launch: float = 1.25

    def __post_init__(self) -> None:
        require_declared(self, error=AdmissionError)
        if self.batch < 1:
            raise AdmissionError(f"batch must be at least 1, not {self.batch}")
        if not 1 <= self.launch <= 2:
            raise AdmissionError(f"launch must lie in 1 .. 2, not {self.launch}")

    @property
    def max_deferrals(self) -> int:
        """No bound: waiting units have no tokens that could become stale."""
        return sys.maxsize

    def admit(self, view: AdmitView) -> int:
        """Launch a short round, unless a whole batch waits for a long one."""
        return 0 if view.carried >= self.batch else math.ceil(self.launch * self.batch)

    @property
    def restarts(self) -> Literal[True]:
        """True: discarded units fill long rounds, and rounds with too few new units."""
        return True

    def cut(self, view: CutView) -> bool:
        """Stop once the batch is full."""
        return view.placed >= self.batch

    def observe(self, seen: Observation) -> None:
        """Learn nothing."""
