"""Tail batching: strictly on-policy, and yet few steps wait for the longest responses."""

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
    """Short rounds that drop their tail, and long rounds made of nothing but tails (RollPacker, arXiv 2509.21009).

    A short round launches ``launch * batch`` units, takes the first ``batch`` that are complete and gives the others
    up. When a whole batch of those waits, a long round begins them anew, with the weights of that time, and waits for
    all. So nothing is ever trained by other weights than those that made it, at the price of the tokens given up
    (``deferral/discarded_tokens``) and of batches whose mean length swings: short ones for some steps, then a long one.
    Nothing is lost: every prompt is trained exactly once, and near the end of the run, or of the data, what waits fills
    the rounds up.

    Attributes:
        batch: units in a full batch.
        launch: units launched in a short round, in batches.

    Raises:
        AdmissionError: ``batch`` < 1, or ``launch`` outside of 1 .. 2.

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
        """No bound: what waits has no tokens that could become stale."""
        return sys.maxsize

    def admit(self, view: AdmitView) -> int:
        """Launch a short round, unless a whole batch waits for a long one."""
        return 0 if view.carried >= self.batch else math.ceil(self.launch * self.batch)

    @property
    def restarts(self) -> Literal[True]:
        """True: a long round, or one for which there are too few new units, is filled up with what was given up."""
        return True

    def cut(self, view: CutView) -> bool:
        """Stop once the batch is full."""
        return view.placed >= self.batch

    def observe(self, seen: Observation) -> None:
        """Learn nothing."""
