"""Whether the lengths that are trained are those that are generated: carrying stragglers biases them for a while."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oppo.events import Batch

WINDOW = 16
"""Steps over which lengths are compared: long beside the age of any rollout, short beside a run."""


@dataclass(slots=True)
class LengthBias:
    """Compares the lengths of what the last steps trained with those of what was generated for the same prompts.

    What a step trains is biased towards short responses: the long ones are carried. What is generated is known without
    bias below the oldest rollout in flight, in the order of admission, since everything there is complete. So the bias
    of the last :data:`WINDOW` steps is the mean length of the n rollouts they trained over that of the last n rollouts
    below the oldest in flight (as many as there are, while a run is young). 1: none, which is so to the bit where
    nothing is carried; below 1: long responses are still to come. A rollout that was dropped counts nowhere.
    """

    _steps: deque[list[int]] = field(default_factory=lambda: deque(maxlen=WINDOW))
    _complete: deque[int] = field(default_factory=deque)
    _waiting: dict[int, int] = field(default_factory=dict)

    def after(self, batch: Batch) -> float | None:
        """Take a step's batch; return the bias after it, or ``None`` where nothing is complete yet."""
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
        return _mean(trained) / _mean(self._complete)

    def state_dict(self) -> Mapping[str, Any]:
        """Return what is known of the last steps."""
        return {
            "steps": [list(step) for step in self._steps],
            "complete": list(self._complete),
            "waiting": [[rollout, length] for rollout, length in self._waiting.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there."""
        self._steps = deque(([int(length) for length in step] for step in state["steps"]), maxlen=WINDOW)
        self._complete = deque(int(length) for length in state["complete"])
        self._waiting = {int(rollout): int(length) for rollout, length in state["waiting"]}


def _mean(lengths: Iterable[int]) -> float:
    counted = list(lengths)
    return sum(counted) / len(counted)
