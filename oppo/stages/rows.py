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
        reference: log-probs of the reference model; ``None``: there is none, and the policy's own stand for them, from
            which its KL is 0.
        values: of the critic; ``None``: there is none, and zeros stand for them.
        proximal: log-probs under the weights that are about to be updated; ``None``: nobody computed them, and those of
            the policy that sampled the tokens stand for them.
    """

    finish: Finish
    reference: FloatArray | None
    score: float
    values: FloatArray | None = None
    proximal: FloatArray | None = None

    @property
    def logprobs(self) -> FloatArray:
        """The proximal log-probs, or what stands for them: float32 [n]."""
        return self.finish.response.logprobs if self.proximal is None else self.proximal

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
            "proximal log-prob": self.logprobs,
        }
        wrong = (name for name, value in said.items() if value is not None and not (np.abs(value) <= LARGEST).all())
        return next((Drop(self.finish.rollout, f"{NONFINITE} {name}", nonfinite=True) for name in wrong), None)


def unestimated(rows: Sequence[Row], dropped: Sequence[Drop] = (), deferred: Sequence[Defer] = ()) -> Batch:
    """Return the batch of these rows, in the order given; rewards, advantages and returns are 0, metrics are none.

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
        proximal=flat([row.logprobs for row in rows]),
        reference=flat([row.logprobs if row.reference is None else row.reference for row in rows]),
        values=flat([np.zeros(len(row.logprobs), np.float32) if row.values is None else row.values for row in rows]),
        rewards=np.zeros(tokens, np.float32),
        advantages=np.zeros(tokens, np.float32),
        returns=np.zeros(tokens, np.float32),
        dropped=tuple(dropped),
        deferred=tuple(deferred),
        has_reference=all(row.reference is not None for row in rows),
        has_proximal=all(row.proximal is not None for row in rows),
    )


def flat(arrays: Sequence[FloatArray]) -> FloatArray:
    """Return per-row float arrays end to end, as float32."""
    return np.concatenate([np.asarray(array, np.float32) for array in arrays] or [np.zeros(0, np.float32)])
