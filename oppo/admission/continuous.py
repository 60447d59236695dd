"""Continuous batching across steps: a completed unit is replaced at once, and a step is cut when its batch is full."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from oppo.admission.observation import Observation
from oppo.admission.overcommit import Overcommit
from oppo.admission.protocol import AdmitView, CutView, RefillView
from oppo.declared import require_declared
from oppo.errors import AdmissionError


@dataclass(frozen=True, slots=True)
class Continuous:
    """Keeps ``extra`` units decoding: new ones join whenever some are completed.

    So a decode step has all its rows until the cut, and a batch has the units that are completed first, of whatever
    step. The others are carried: up to ``extra``, with a mean lag of about extra / batch steps. With lookahead and
    weights that are published in flight this is PipelineRL (arXiv 2509.19128), but every prompt is trained once, and no
    token is more than ``max_deferrals`` + lookahead updates old.

    Attributes:
        batch: units in a full batch.
        extra: the units that are decoded at a time, and the most that are carried.
        max_deferrals: the cut waits for units of this age.

    Raises:
        AdmissionError: ``batch`` < 1, ``extra`` outside 1 .. batch, or ``max_deferrals`` < 1.

    Example:
        >>> Continuous(batch=64, extra=32).refill(RefillView(placed=10, decoding=30, unplaced=30))
        2
    """

    batch: int
    extra: int
    max_deferrals: int = 2

    def __post_init__(self) -> None:
        require_declared(self, error=AdmissionError)
        if self.extra < 1:
            raise AdmissionError(f"extra units are decoded at a time, so it must be at least 1, not {self.extra}")
        Overcommit(self.batch, self.extra, self.max_deferrals)  # checks the rest

    def admit(self, view: AdmitView) -> int:
        """Begin with ``extra`` units that decode, the carried ones included."""
        return max(0, self.extra - (view.carried - view.complete))

    def refill(self, view: RefillView) -> int:
        """Keep ``extra`` units decoding, unless the batch and ``extra`` more belong to the step already."""
        room = self.batch + self.extra - view.placed - view.unplaced
        return max(0, min(self.extra - view.decoding, room))

    def cut(self, view: CutView) -> bool:
        """Stop once the batch is full and no overdue unit is decoding."""
        return view.placed >= self.batch and not view.overdue

    def observe(self, seen: Observation) -> None:
        """Learn nothing."""

    def metrics(self) -> Mapping[str, float]:
        """Return the units that are decoded at a time."""
        return {"deferral/extra": float(self.extra)}
