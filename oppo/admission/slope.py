"""The paper's controller of overcommit: it follows the slope of the score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, cast

from oppo.admission.observation import Json, Observation
from oppo.admission.overcommit import Overcommit
from oppo.admission.protocol import AdmitView, CutView
from oppo.declared import require_declared
from oppo.errors import AdmissionError

SlopeRule: TypeAlias = Literal["text", "algorithm1"]


@dataclass
class SlopeAdaptive:
    """Raises ``extra`` while the mean score rises and lowers it while it does not (OPPO, arXiv 2509.25762).

    With ``R_i`` the mean score of step i and w = ``window``::

        s_t = 1/w * sum over the last w steps of (R_i - R_{i-1})
        text:        extra + 1 if s_t > 0 else extra - 1                    (the paper's section on the method)
        algorithm1:  extra + k if s_t > 0 else extra - k,  k = max(1, extra // 4)        (its Algorithm 1)

    bounded by ``least`` and ``most``. Both rules are here as they are written, with their weakness: the sum
    telescopes to ``(R_t - R_{t-w}) / w``, so that two noisy scores decide and the w - 1 between them do not count.
    On a noisy plateau each direction is as likely as the other, and ``extra`` wanders around the middle of its range
    instead of decaying, although nothing is learned there that staleness could spoil. Nor does it ever look at time:
    it pays lag as readily where deferral gains nothing. :class:`oppo.TailAdaptive` is the robust one.

    Attributes:
        batch: units in a full batch.
        rule: which of the two.
        least, most: bounds of ``extra``; the paper's are often 0 and 8.
        window: steps the slope is taken over; until there are so many, ``extra`` stays.
        initial: the first ``extra``; the middle of the range unless given.
        max_deferrals: the cut waits for units of this age.

    Raises:
        AdmissionError: ``least <= initial <= most <= batch`` does not hold, or ``window`` or another is below 1.

    Example:
        >>> rising = SlopeAdaptive(batch=16, window=2)
        >>> for step in range(4):
        ...     rising.observe(Observation(step, score=float(step)))
        >>> rising.extra
        6
    """

    batch: int
    rule: SlopeRule = "text"
    least: int = 0
    most: int = 8
    window: int = 10
    initial: int | None = None
    max_deferrals: int = 2
    _now: Overcommit = field(init=False, repr=False)
    _scores: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        require_declared(self, error=AdmissionError)
        first = (self.least + self.most) // 2 if self.initial is None else self.initial
        if not 0 <= self.least <= first <= self.most:
            raise AdmissionError(f"0 <= least <= initial <= most must hold, not 0, {self.least}, {first}, {self.most}")
        if self.window < 1:
            raise AdmissionError(f"window must be at least 1, not {self.window}")
        Overcommit(self.batch, self.most, self.max_deferrals)  # which checks the largest it may come to
        self._now = Overcommit(self.batch, first, self.max_deferrals)

    @property
    def extra(self) -> int:
        """Delta of the step to come."""
        return self._now.extra

    def admit(self, view: AdmitView) -> int:
        """Fill up to ``batch + extra``."""
        return self._now.admit(view)

    def cut(self, view: CutView) -> bool:
        """Stop once the batch is full and nobody overdue is still decoding."""
        return self._now.cut(view)

    def observe(self, seen: Observation) -> None:
        """Follow the slope; a step without a score counts as none."""
        if not math.isfinite(seen.score):
            return
        self._scores = [*self._scores, seen.score][-self.window - 1 :]
        if len(self._scores) <= self.window:
            return
        rising = self._scores[-1] - self._scores[0] > 0  # what the sum of the differences comes to
        stride = 1 if self.rule == "text" else max(1, self.extra // 4)
        moved = self.extra + (stride if rising else -stride)
        self._now = replace(self._now, extra=min(self.most, max(self.least, moved)))

    def metrics(self) -> Mapping[str, float]:
        """Return the extra units of the step at hand."""
        return self._now.metrics()

    def state_dict(self) -> dict[str, Json]:
        """Return ``extra`` and the scores in the window."""
        return {"extra": self.extra, "scores": list(self._scores)}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Go on from what :meth:`state_dict` returned."""
        self._now = replace(self._now, extra=cast("int", state["extra"]))
        self._scores = list(cast("list[float]", state["scores"]))
