"""Ends runs that train nothing, with the number of dropped rollouts by reason."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from oppo.errors import NothingTrained
from oppo.events import Drop, StepReport

SHOWN = 3
"""Reasons in the message."""

_KINDS = 1000  # distinct reasons that are counted one by one


@dataclass(slots=True)
class Reasons:
    """Counts drops by reason; reasons that differ only in numbers are one kind, named by its first."""

    counts: Counter[str] = field(default_factory=Counter)
    _first: dict[str, str] = field(default_factory=dict)

    def add(self, drops: Iterable[Drop]) -> None:
        """Count these too."""
        for drop in drops:
            kind = re.sub(r"\d+", "", drop.reason) if len(self._first) < _KINDS else ""
            self.counts[self._first.setdefault(kind, drop.reason if kind else "other reasons")] += 1

    def __str__(self) -> str:
        shown = [f"{count} x {reason}" for reason, count in self.counts.most_common(SHOWN)]
        rest = len(self.counts) - len(shown)
        return "; ".join([*shown, *([f"{rest} other reasons"] if rest > 0 else [])]) or "no rollout ended"


@dataclass(slots=True)
class EmptySteps:
    """Counts consecutive steps that train nothing.

    Attributes:
        limit: this many in a row end the run; 0: no limit.
    """

    limit: int
    _in_a_row: int = 0
    _since_trained: Reasons = field(default_factory=Reasons)
    _in_all: Reasons = field(default_factory=Reasons)

    def after(self, report: StepReport) -> None:
        """Count a step.

        Raises:
            NothingTrained: ``limit`` steps in a row trained nothing.
        """
        self._in_all.add(report.dropped)
        if report.trained:
            self._in_a_row, self._since_trained = 0, Reasons()
            return
        self._in_a_row += 1
        self._since_trained.add(report.dropped)
        if self._in_a_row == self.limit:
            raise NothingTrained(
                f"no rollout was trained in {self.limit} steps in a row ({self._since_trained}): look at these "
                f"reasons; run.max_empty = {self.limit} is the limit, 0 sets none"
            )

    def require_trained(self, trained: int, steps: int) -> None:
        """Check at the end of a run that its ``steps`` steps trained a rollout.

        Raises:
            NothingTrained: there were steps, and no rollout was trained.
        """
        if steps and not trained:
            raise NothingTrained(f"no rollout was trained in the {steps} steps of the run: {self._in_all}")
