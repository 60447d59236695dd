"""Rewards, advantages and returns from scores, log-probs and values; numpy only.

Arrays are of one response, one-dimensional, float32 in and out; sums are taken in float64. What takes ``sampled`` or a
mask is given all tokens of a response: those that were not sampled (a tool's answer), where it is false, get no reward
and count nowhere. What takes none is given the sampled tokens alone.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

import numpy as np

from oppo.declared import require_declared
from oppo.events import BoolArray, FloatArray

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
GroupAdvantage: TypeAlias = Literal["leave_one_out", "standardised", "centred"]

WHITEN_EPSILON = 1e-8
"""Added to the variance under the square root, as in TRL."""

GROUP_EPSILON = 1e-4
"""Added to the standard deviation of a group in the denominator, as in TRL's GRPO."""

MAX_KL_ERROR = 0.2
"""Bound on the relative error in the adaptive KL coefficient (Ziegler et al. 2019, section 2.2)."""

MIN_KL_FACTOR = 0.1
"""The least factor by which one step multiplies the adaptive KL coefficient."""


def gae(
    rewards: FloatArray, values: FloatArray, gamma: float, lam: float, last_value: float = 0.0
) -> tuple[FloatArray, FloatArray]:
    """Return the generalized advantage estimates of the sampled tokens of one response, and the returns they imply.

    ``delta[t] = rewards[t] + gamma * values[t + 1] - values[t]``, with ``values[T] = last_value``;
    ``advantages[t] = delta[t] + gamma * lam * advantages[t + 1]``; ``returns = advantages + values``
    (Schulman et al. 2016, arXiv 1506.02438, equations 11 and 16).

    Args:
        rewards: float32 [T], of each sampled token.
        values: float32 [T], of the state before each of them.
        gamma: discount of the next value, in [0, 1].
        lam: weight of the longer estimates, in [0, 1]: 0 is one-step, 1 is Monte Carlo.
        last_value: of the state after the response: 0 where the response has ended it.

    Raises:
        ValueError: the arrays differ in shape or are not one-dimensional.
    """
    _require_aligned(rewards=rewards, values=values)
    following = np.append(values[1:], np.float32(last_value))[: len(values)]
    delta = (rewards.astype(np.float64) + gamma * following.astype(np.float64) - values).tolist()
    advantages = np.zeros(len(delta), np.float64)
    running = 0.0
    for t in range(len(delta) - 1, -1, -1):
        running = delta[t] + gamma * lam * running
        advantages[t] = running
    return advantages.astype(np.float32), (advantages + values).astype(np.float32)


def returns_to_go(rewards: FloatArray, gamma: float) -> FloatArray:
    """Return the discounted sum of the rewards from each sampled token on: float32 [T].

    ``returns[t] = rewards[t] + gamma * returns[t + 1]`` (Williams 1992, REINFORCE with the reward to go).

    Args:
        rewards: float32 [T], of each sampled token.
        gamma: discount of the next reward, in [0, 1].
    """
    _require_aligned(rewards=rewards)
    return gae(rewards, np.zeros_like(rewards), gamma, 1.0)[1]


def kl_estimate(logprobs: FloatArray, reference: FloatArray, estimator: KLEstimator = "k1") -> FloatArray:
    """Return an estimate, per sampled token, of KL(policy || reference): float32 [T], nats.

    With ``r = reference - logprobs``: ``k1 = -r``, unbiased and of either sign; ``k2 = r**2 / 2``, biased and never
    negative; ``k3 = exp(r) - 1 - r``, unbiased and never negative (Schulman 2020, "Approximating KL divergence",
    joschu.net/blog/kl-approx.html). It is infinite where float32 does not hold it: from 88 nats on with ``k3``.

    Raises:
        ValueError: the arrays differ in shape, or the estimator is unknown.
    """
    _require_aligned(logprobs=logprobs, reference=reference)
    difference = reference.astype(np.float64) - logprobs
    with np.errstate(over="ignore"):  # what is not finite is dropped by name, with its rollout
        if estimator == "k1":
            return (-difference).astype(np.float32)
        if estimator == "k2":
            return (0.5 * np.square(difference)).astype(np.float32)
        if estimator == "k3":
            return (np.expm1(difference) - difference).astype(np.float32)
    raise ValueError(f"the KL estimator must be 'k1', 'k2' or 'k3', not {estimator!r}")


def shaped_rewards(
    score: float,
    kl: FloatArray,
    coefficient: float,
    sampled: BoolArray | None = None,
    earned: FloatArray | None = None,
) -> FloatArray:
    """Return the reward of each token: the KL penalty everywhere, and the score at the last sampled token.

    The action that ends a response, EOS, earns the score, and the value of what comes after it is 0. TRL puts the score
    of a response that ended early one position later, at a slot that has a value but no token, and trains that value
    too; the two agree where every response reaches the cap.

    If it is known which tokens earned the score, these have what they earned, and the last sampled token has the rest,
    so that the rewards of a response still sum to its score, less the KL penalty.

    Args:
        score: the reward model's scalar.
        kl: float32 [T], nats per token.
        coefficient: weight of the penalty.
        sampled: bool [T]; all true by default. Other tokens get reward 0.
        earned: float32 [T], in the unit of the score; 0 everywhere by default. What a token earned that was not sampled
            (a tool's answer) goes to the sampled token before it, or to the first one.

    Raises:
        ValueError: no token was sampled, so none can carry the score.
    """
    mask = np.ones(len(kl), np.bool_) if sampled is None else sampled
    _require_aligned(kl=kl, sampled=mask, **({} if earned is None else {"earned": earned}))
    positions = np.flatnonzero(mask)
    if not len(positions):
        raise ValueError(f"none of the {len(kl)} tokens of the response was sampled, so there is none to reward")
    rewards = np.where(mask, np.float32(-coefficient) * kl, np.float32(0)).astype(np.float32)
    rest = float(score)
    if earned is not None:
        at = np.flatnonzero(earned)
        earners = positions[np.maximum(np.searchsorted(positions, at, side="right") - 1, 0)]
        totals = np.zeros(len(kl), np.float64)
        np.add.at(totals, earners, earned[at])
        totals[positions[-1]] = 0
        (rewarded,) = np.nonzero(totals)
        rewards[rewarded] += totals[rewarded].astype(np.float32)
        rest -= float(totals.sum())
    rewards[positions[-1]] += np.float32(rest)
    return rewards


def whiten(x: FloatArray, mask: BoolArray, *, shift_mean: bool = True) -> FloatArray:
    """Return ``x`` with unit variance, and mean zero if ``shift_mean``, over the entries where ``mask`` is true.

    The variance is unbiased, as in TRL's ``masked_whiten``, and 0 for fewer than two entries. Entries outside of the
    mask become 0.

    Args:
        x: float32 [T], of a whole batch.
        mask: bool [T].
        shift_mean: false keeps the mean.
    """
    _require_aligned(x=x, mask=mask)
    counted = x[mask].astype(np.float64)
    if not len(counted):
        return np.zeros_like(x)
    mean = counted.mean()
    variance = counted.var(ddof=1) if len(counted) > 1 else 0.0
    whitened = (x - mean) / np.sqrt(variance + WHITEN_EPSILON)
    return np.where(mask, whitened if shift_mean else whitened + mean, 0.0).astype(np.float32)


def group_advantages(scores: FloatArray, estimator: GroupAdvantage) -> FloatArray:
    """Return the advantage of each response over the other responses to its prompt: float32 [n], of sum 0.

    ``leave_one_out``: ``s[i] - mean(s[j], j != i)``, whose baseline does not depend on the response itself (Kool et al.
    2019, "Buy 4 REINFORCE samples, get a baseline for free!"; for language models RLOO: Ahmadian et al. 2024, arXiv
    2402.14740). ``standardised``: ``(s[i] - mean(s)) / (std(s) + 1e-4)`` (GRPO: Shao et al. 2024, arXiv
    2402.03300, section 4.1.2), with the unbiased deviation, as in TRL. ``centred``: ``s[i] - mean(s)``, which does not
    favour prompts whose scores are nearly alike (Dr. GRPO: Liu et al. 2025, arXiv 2503.20783, section 3); it is
    ``(n - 1) / n`` times the first.

    Args:
        scores: float32 [n], of all responses to one prompt; at least two.
        estimator: one of the three.

    Raises:
        ValueError: there are fewer than two, the array is not one-dimensional, or the estimator is unknown.
    """
    _require_aligned(scores=scores)
    if len(scores) < 2:
        raise ValueError(f"a response is compared with others of its group, which needs two of them, not {len(scores)}")
    exact = scores.astype(np.float64)
    centred = exact - exact.mean()
    if estimator == "leave_one_out":
        advantages = centred * (len(scores) / (len(scores) - 1))
    elif estimator == "standardised":
        advantages = centred / (exact.std(ddof=1) + GROUP_EPSILON)
    elif estimator == "centred":
        advantages = centred
    else:
        raise ValueError(
            f"the advantage in a group must be 'leave_one_out', 'standardised' or 'centred', not {estimator!r}"
        )
    return np.asarray(advantages, np.float32)


@dataclass(frozen=True, slots=True)
class FixedKL:
    """A constant KL coefficient."""

    coefficient: float

    def __post_init__(self) -> None:
        require_declared(self)
        _require_coefficient(self.coefficient)

    def after(self, kl: float, samples: int) -> FixedKL:
        """Return this coefficient."""
        del kl, samples
        return self


@dataclass(frozen=True, slots=True)
class AdaptiveKL:
    """A KL coefficient that steers the KL towards a target (Ziegler et al. 2019, arXiv 1909.08593, section 2.2).

    ``coefficient *= max(0.1, 1 + clip(kl / target - 1, -0.2, 0.2) * samples / horizon)``. Ours is the lower bound, for
    steps that are large beside the horizon: a coefficient of 0 would stay 0.

    Attributes:
        initial: the current coefficient, more than 0.
        target: nats per response.
        horizon: rollouts over which a full error moves the coefficient by a factor of about e**0.2.

    Example:
        >>> AdaptiveKL(0.1, target=6.0, horizon=100).after(kl=12.0, samples=50).coefficient
        0.11000000000000001
    """

    initial: float
    target: float = 6.0
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        require_declared(self)
        _require_coefficient(self.initial)
        if not self.initial:
            raise ValueError(
                "the KL coefficient must be more than 0 where it adapts, not 0: multiplied, it would stay there"
            )
        if not self.target > 0:
            raise ValueError(f"the KL target must be positive, not {self.target}")
        if not self.horizon > 0:
            raise ValueError(f"the KL horizon must be positive, not {self.horizon}")

    @property
    def coefficient(self) -> float:
        """The weight of the penalty in the next step."""
        return self.initial

    def after(self, kl: float, samples: int) -> AdaptiveKL:
        """Return the coefficient after ``samples`` rollouts with a mean KL of ``kl`` nats, always above 0.

        A KL that is not finite changes nothing.
        """
        if not np.isfinite(kl):
            return self
        error = min(max(kl / self.target - 1.0, -MAX_KL_ERROR), MAX_KL_ERROR)
        factor = max(MIN_KL_FACTOR, 1.0 + error * samples / self.horizon)
        return replace(self, initial=max(sys.float_info.min, self.initial * factor))


def _require_coefficient(coefficient: float) -> None:
    if not 0 <= coefficient < float("inf"):
        raise ValueError(f"the KL coefficient must be 0 or more and finite, not {coefficient}")


def _require_aligned(**arrays: FloatArray | BoolArray) -> None:
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"expected one-dimensional arrays of one length, got {shapes}")
