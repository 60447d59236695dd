"""The paper's controller of overcommit: it follows the slope of the score."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias, cast

from oppo.admission.observation import Json, Observation
from oppo.admission.overcommit import AdaptiveOvercommit, Overcommit
from oppo.declared import require_declared
from oppo.errors import AdmissionError

SlopeRule: TypeAlias = Literal["text", "algorithm1"]


@dataclass
class SlopeAdaptive(AdaptiveOvercommit):
    """Raises ``extra`` while the mean score rises and lowers it while it does not (OPPO, arXiv 2509.25762).

    With ``R_i`` the mean score of step i and w = ``window``::

        s_t = 1/w * sum over the last w steps of (R_i - R_{i-1})
        text:        extra + 1 if s_t > 0 else extra - 1                    (the paper's section on the method)
        algorithm1:  extra + k if s_t > 0 else extra - k,  k = max(1, extra // 4)        (its Algorithm 1)

    bounded by ``least`` and ``most``. Both rules follow the paper, with their weakness: the sum telescopes to
    ``(R_t - R_{t-w}) / w``, so two noisy scores decide and the w - 1 between them do not count. On a noisy plateau both
    directions are equally likely, and ``extra`` wanders around the middle of its range instead of decaying. The rules
    ignore time, so they accept lag where deferral gains nothing. :class:`oppo.TailAdaptive` is the robust controller.

    Attributes:
        batch: units in a full batch.
        rule: one of the two.
        least, most: bounds of ``extra``; the paper's are often 0 and 8.
        window: steps of the slope; ``extra`` stays until there are as many.
        initial: the first ``extra``; ``None`` for the middle of the range.
        max_deferrals: the cut waits for units of this age.

    Raises:
        AdmissionError: ``least <= initial <= most <= batch`` does not hold, or ``window`` or ``max_deferrals`` < 1.

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
    _current: Overcommit = field(init=False, repr=False)
    _scores: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        require_declared(self, error=AdmissionError)
        first = (self.least + self.most) // 2 if self.initial is None else self.initial
        if not 0 <= self.least <= first <= self.most:
            raise AdmissionError(f"0 <= least <= initial <= most must hold, not 0, {self.least}, {first}, {self.most}")
        if self.window < 1:
            raise AdmissionError(f"window must be at least 1, not {self.window}")
        Overcommit(self.batch, self.most, self.max_deferrals)  # checks the largest extra
        self._current = Overcommit(self.batch, first, self.max_deferrals)

    def observe(self, seen: Observation) -> None:
        """Follow the slope; a step without a score does not count."""
        if not math.isfinite(seen.score):
            return
        self._scores = [*self._scores, seen.score][-self.window - 1 :]
        if len(self._scores) <= self.window:
            return
        rising = self._scores[-1] - self._scores[0] > 0  # the sign of the telescoped sum
        stride = 1 if self.rule == "text" else max(1, self.extra // 4)
        moved = self.extra + (stride if rising else -stride)
        self._current = replace(self._current, extra=min(self.most, max(self.least, moved)))

    def state_dict(self) -> dict[str, Json]:
        """Return ``extra`` and the scores in the window."""
        return {"extra": self.extra, "scores": list(self._scores)}

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """Restore what :meth:`state_dict` returned."""
        self._current = replace(self._current, extra=cast("int", state["extra"]))
        self._scores = list(cast("list[float]", state["scores"]))
