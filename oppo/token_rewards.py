"""A score that says where it was earned: rewards at the tokens of a response, whose sum is the score."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self, SupportsFloat

import numpy as np

from oppo.events import FloatArray


class TokenRewards(float):
    """The rewards of the tokens of one response; as a number, their sum.

    A scorer returns it in place of a number where it knows which tokens earned the score, as a process reward model
    does. Stages that estimate the advantage of each token use the rewards where they stand; all others use the sum.

    Args:
        rewards: float [n], for a response of n tokens.

    Attributes:
        rewards: float32 [n]; not to be written to.

    Raises:
        ValueError: the rewards are no numbers in one row.

    Example:
        >>> score = TokenRewards.at(4, {1: 0.5, -1: 2.0})
        >>> float(score), score.rewards.tolist()
        (2.5, [0.0, 0.5, 0.0, 2.0])
    """

    __slots__ = ("rewards",)

    rewards: FloatArray

    def __new__(cls, rewards: Iterable[SupportsFloat] | FloatArray) -> Self:  # noqa: D102 - described by its class
        given = np.asarray(rewards if isinstance(rewards, np.ndarray) else list(rewards))
        if given.ndim != 1 or (given.dtype.kind not in "fiub" and len(given)):
            raise ValueError(f"rewards of tokens are numbers in one row, one for each token; got {given!r:.200}")
        with np.errstate(over="ignore"):  # a number that is no finite float32 drops its rollout later, by name
            values = given.astype(np.float32)
            score = super().__new__(cls, values.sum(dtype=np.float64))
        values.flags.writeable = False
        score.rewards = values
        return score

    @classmethod
    def at(cls, length: int, rewards: Mapping[int, SupportsFloat]) -> Self:
        """Return the rewards of a response of ``length`` tokens that stand at some positions; the others are 0.

        A negative position counts from the end: -1 is the last token.

        Raises:
            ValueError: a position is no token of the response.
        """
        values = np.zeros(length, np.float64)
        for position, reward in rewards.items():
            if not -length <= position < length:
                raise ValueError(f"there is no token {position} in a response of {length} tokens to be rewarded")
            values[position] += float(reward)
        return cls(values)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self.rewards,)

    def __repr__(self) -> str:
        return f"TokenRewards(sum={float(self)}, tokens={len(self.rewards)})"


def weighted_sum(scores: Iterable[tuple[float, float]]) -> float:
    """Return the sum of weight times score; rewards at tokens stay where they are, and a number is the last token's.

    Args:
        scores: weight and score of each, all of the same response.
    """
    terms = list(scores)
    lengths = {len(score.rewards) for _, score in terms if isinstance(score, TokenRewards)}
    if not lengths:
        return float(sum(weight * score for weight, score in terms))
    total = np.zeros(max(lengths), np.float64)
    for weight, score in terms:
        rewards = score.rewards if isinstance(score, TokenRewards) else TokenRewards.at(len(total), {-1: score}).rewards
        total += weight * rewards.astype(np.float64)
    return TokenRewards(total)
