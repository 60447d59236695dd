"""What is known of one finished rollout, and many of them end to end: a batch of which nothing is estimated yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from oppo.events import Batch, Defer, Drop, Finish, FloatArray

LARGEST = float(np.finfo(np.float32).max)
NONFINITE = "nonfinite"
"""Begins the reason of a drop whose cause is a number that is not finite."""

UNSAMPLED = "nothing was sampled"
"""Why a rollout is dropped whose response is empty, or was given: no token of it has earned the score."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One finished rollout with everything that was said of it; per-token arrays have the response's length.

    Attributes:
        reference: log-probs of the reference model; ``None`` without one.
        values: of the critic; ``None`` without one.
        proximal: log-probs under the weights that are about to be updated; ``None`` unless they were computed.
    """

    finish: Finish
    reference: FloatArray | None
    score: float
    values: FloatArray | None = None
    proximal: FloatArray | None = None

    def fault(self) -> Drop | None:
        """Return the rollout as dropped where it cannot be trained: nothing was sampled, or a number is not finite.

        Of several numbers that are no finite float32, the first is told.
        """
        if not self.finish.response.sampled.any():
            return Drop(self.finish.rollout, UNSAMPLED)
        said: Mapping[str, float | FloatArray | None] = {
            "score": self.score,
            "reference log-prob": self.reference,
            "value": self.values,
            "behaviour log-prob": self.finish.response.logprobs,
            "proximal log-prob": self.proximal,
        }
        wrong = (name for name, value in said.items() if value is not None and not (np.abs(value) <= LARGEST).all())
        return next((Drop(self.finish.rollout, f"{NONFINITE} {name}", nonfinite=True) for name in wrong), None)


def unestimated(rows: Sequence[Row], dropped: Sequence[Drop] = (), deferred: Sequence[Defer] = ()) -> Batch:
    """Return the batch of these rows, in the order given; rewards and advantages are 0, returns and metrics are none.

    What is not known of every row, the batch does not have.

    Args:
        rows: any number of them, of any length.
        dropped: the rollouts of the step that are not trained.
        deferred: those that are carried into the next one.
    """
    responses = [row.finish.response for row in rows]
    lengths = [len(response) for response in responses]
    tokens = sum(lengths)
    return Batch(
        responses=tuple(responses),
        reasons=tuple(row.finish.reason for row in rows),
        scores=np.array([row.score for row in rows], np.float32),
        offsets=np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64))),
        tokens=np.concatenate([r.tokens for r in responses] or [np.zeros(0, np.int32)]),
        versions=np.concatenate([r.versions for r in responses] or [np.zeros(0, np.int32)]),
        sampled=np.concatenate([r.sampled for r in responses] or [np.zeros(0, np.bool_)]),
        logprobs=flat([response.logprobs for response in responses]),
        proximal=_known([row.proximal for row in rows]),
        reference=_known([row.reference for row in rows]),
        values=_known([row.values for row in rows]),
        rewards=np.zeros(tokens, np.float32),
        advantages=np.zeros(tokens, np.float32),
        returns=None,
        dropped=tuple(dropped),
        deferred=tuple(deferred),
    )


def _known(arrays: Sequence[FloatArray | None]) -> FloatArray | None:
    known = [array for array in arrays if array is not None]
    return flat(known) if len(known) == len(arrays) else None


def flat(arrays: Sequence[FloatArray]) -> FloatArray:
    """Return per-row float arrays end to end, as float32."""
    return np.concatenate([np.asarray(array, np.float32) for array in arrays] or [np.zeros(0, np.float32)])
