"""Runs in which nothing is trained: ended by a sentence that counts, by reason, what was dropped."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from oppo.errors import NothingTrained
from oppo.events import Drop, StepReport

SHOWN = 3
"""Reasons that the sentence names."""

_KINDS = 1000  # of reasons that are told apart


@dataclass(slots=True)
class Reasons:
    """Counts drops by their reasons; those that differ in numbers only are of one kind, named by the first of them."""

    counts: Counter[str] = field(default_factory=Counter)
    _first: dict[str, str] = field(default_factory=dict)

    def add(self, drops: Iterable[Drop]) -> None:
        """Count some more."""
        for drop in drops:
            kind = re.sub(r"\d+", "", drop.reason) if len(self._first) < _KINDS else ""
            self.counts[self._first.setdefault(kind, drop.reason if kind else "other reasons")] += 1

    def __str__(self) -> str:
        shown = [f"{count} x {reason}" for reason, count in self.counts.most_common(SHOWN)]
        more = len(self.counts) - len(shown)
        return "; ".join([*shown, *([f"{more} other reasons"] if more > 0 else [])]) or "no rollout ended"


@dataclass(slots=True)
class EmptySteps:
    """Watches for steps that train nothing.

    Attributes:
        limit: so many of them in a row end the run; 0: any number is fine.
    """

    limit: int
    _in_a_row: int = 0
    _lately: Reasons = field(default_factory=Reasons)
    _ever: Reasons = field(default_factory=Reasons)

    def after(self, report: StepReport) -> None:
        """Take note of a step.

        Raises:
            NothingTrained: it was the last of too many.
        """
        self._ever.add(report.dropped)
        if report.trained:
            self._in_a_row, self._lately = 0, Reasons()
            return
        self._in_a_row += 1
        self._lately.add(report.dropped)
        if self._in_a_row == self.limit:
            raise NothingTrained(
                f"no rollout was trained in {self.limit} steps in a row ({self._lately}): look at these reasons; "
                f"run.max_empty = {self.limit} is the limit, 0 sets none"
            )

    def require_trained(self, trained: int, steps: int) -> None:
        """Raise at the end of a run that has trained nothing.

        Args:
            trained: rollouts trained in the whole run.
            steps: made in the whole run.

        Raises:
            NothingTrained: there were steps, and no rollout was trained.
        """
        if steps and not trained:
            raise NothingTrained(f"no rollout was trained in the {steps} steps of the run: {self._ever}")
