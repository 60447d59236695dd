"""The gradient of those rows of a batch that are known so far, and the rows that it is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from oppo.events import Batch
from oppo.hf.train.packing import MicroBatch
from oppo.losses import Input

_COMPARED = ("tokens", "sampled", "logprobs", "versions", "advantages", "proximal", "reference", "values", "returns")
"""The columns of a batch, a number for each token, that a loss may read."""


@dataclass(slots=True, eq=False)
class PartialGradient:
    """The accumulated part of a batch; the gradient itself is held by the optimisation.

    Attributes:
        version: of the weights that it is of.
        parts: the micro-batches, each with the models' outputs, without gradient: float32 [T].
        finite: whether all losses and gradients so far were finite.
    """

    version: int
    parts: list[tuple[MicroBatch, Mapping[Input, Tensor]]] = field(default_factory=list)
    finite: bool = True
    _rows: dict[int, tuple[Batch, int]] = field(default_factory=dict)

    def note(self, part: Batch) -> None:
        """Record the rows of a part of the batch."""
        self._rows.update({rollout: (part, row) for row, rollout in enumerate(part.rollouts)})

    def holds(self, rollout: int) -> bool:
        """Return whether a rollout is among its rows."""
        return rollout in self._rows

    def is_of(self, batch: Batch, version: int) -> bool:
        """Return whether it is finite, of these weights, and of rows that are all in ``batch``, as they are there."""
        at = {rollout: row for row, rollout in enumerate(batch.rollouts)}
        known = self._rows.items()
        return (
            self.finite
            and self.version == version
            and all(rollout in at and _alike(part, row, batch, at[rollout]) for rollout, (part, row) in known)
        )


def _alike(one: Batch, row: int, other: Batch, at: int) -> bool:
    """Return whether two rows hold the same, to the last bit."""
    here, there = one.rows()[row], other.rows()[at]
    columns: Sequence[tuple[object, object]] = [(getattr(one, name), getattr(other, name)) for name in _COMPARED]
    same_group = one.responses[row].prompt.group == other.responses[at].prompt.group
    return (
        same_group
        and one.scores[row] == other.scores[at]
        and all(
            mine is theirs is None
            if mine is None or theirs is None
            else np.array_equal(np.asarray(mine)[here], np.asarray(theirs)[there])
            for mine, theirs in columns
        )
    )
