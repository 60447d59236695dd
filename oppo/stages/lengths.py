"""The length bias of training: carrying stragglers trains shorter responses than are generated, for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from oppo.events import Batch

WINDOW = 16
"""Steps over which lengths are compared: long beside the age of any rollout, short beside a run."""


@dataclass(slots=True)
class LengthBias:
    """Compares the lengths of trained responses with those of generated ones.

    A step's batch is biased towards short responses, since long ones are carried. Below the oldest rollout in flight,
    in admission order, every response is complete, so lengths there are unbiased. The bias of the last :data:`WINDOW`
    steps is the mean length of the n rollouts they trained over that of the last n rollouts below the oldest in flight
    (or of all of them early in a run). 1: no bias, exact to the bit if nothing is carried; below 1: long responses are
    still to come. Dropped rollouts do not count.
    """

    _steps: deque[list[int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _complete: deque[int] = field(default_factory=deque)
    _waiting: dict[int, int] = field(default_factory=dict)

    def after(self, batch: Batch) -> float | None:
        """Add a step's batch; return the bias after it, or ``None`` while nothing is complete."""
        lengths = dict(zip(batch.rollouts, map(len, batch.responses), strict=True))
        self._steps.append(list(lengths.values()))
        self._waiting |= lengths
        oldest = min((event.rollout for event in batch.deferred), default=None)
        for rollout in sorted(self._waiting):
            if oldest is None or rollout < oldest:
                self._complete.append(self._waiting.pop(rollout))
        trained = [length for step in self._steps for length in step]
        while len(self._complete) > len(trained):
            self._complete.popleft()
        if not self._complete:
            return None
        return (sum(trained) / len(trained)) / (sum(self._complete) / len(self._complete))

    def state_dict(self) -> Mapping[str, Any]:
        """Return the lengths of the last steps."""
        return {
            "steps": [list(step) for step in self._steps],
            "complete": list(self._complete),
            "waiting": [[rollout, length] for rollout, length in self._waiting.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the lengths."""
        self._steps = deque(([int(length) for length in step] for step in state["steps"]), maxlen=WINDOW)
        self._complete = deque(int(length) for length in state["complete"])
        self._waiting = {int(rollout): int(length) for rollout, length in state["waiting"]}
