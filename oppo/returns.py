"""Returns: scores to rewards, rewards and values to advantages, and importance weights of stale tokens; numpy only.

Arrays are of one response, one-dimensional, float32 in and out; sums are taken in float64. A function with a parameter
``sampled`` or a mask takes all tokens of a response: tool tokens, where it is false, get no reward and count nowhere.
A function without one takes the sampled tokens alone.

Scores are shaped in this order: running normalisation, clip, scale, and penalties for responses that did not end by
themselves, and for long ones. The penalties come last, so they are in the unit of the reward, not of the scores.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, Self, SupportsFloat, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from oppo.declared import AtLeastOne, Count, Fraction, Limit, NonNegative, Positive, validated
from oppo.errors import ConfigError, ProtocolError, counted
from oppo.events import BoolArray, Finish, FloatArray, IntArray, described

KLEstimator: TypeAlias = Literal["k1", "k2", "k3"]
GroupAdvantage: TypeAlias = Literal["leave_one_out", "standardised", "centred", "batch_standardised", "max_rl"]
Credit: TypeAlias = Literal["response", "turns", "state"]
Over: TypeAlias = Literal["tokens", "turns"]

WHITEN_EPSILON = 1e-8  # added to the variance under the square root, as in TRL
GROUP_EPSILON = 1e-4  # added to the standard deviation of a group in the denominator, as in TRL's GRPO
MAX_KL_ERROR = 0.2  # bound on the relative error in the adaptive KL coefficient (Ziegler et al. 2019, section 2.2)
MIN_KL_FACTOR = 0.1  # the least factor by which one step multiplies the adaptive KL coefficient


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
    with np.errstate(over="ignore"):  # a rollout with a value that is not finite is dropped by name
        if estimator == "k1":
            return (-difference).astype(np.float32)
        if estimator == "k2":
            return (0.5 * np.square(difference)).astype(np.float32)
        if estimator == "k3":
            return (np.expm1(difference) - difference).astype(np.float32)
    raise ValueError(f"the KL estimator must be 'k1', 'k2' or 'k3', not {estimator!r}")


def distillation_advantages(logprobs: FloatArray, teacher: FloatArray, coefficient: float) -> NDArray[np.float64]:
    """Return what a teacher adds to the advantage of each sampled token: float64 [T].

    ``-coefficient * (log pi - log T)``: the policy gradient of the reverse KL(pi || T), one token at a time, on
    responses of the policy (on-policy distillation: Agarwal et al. 2024, arXiv 2306.13649; Gu et al. 2024, arXiv
    2306.08543).

    Args:
        logprobs: float32 [T], of the policy.
        teacher: float32 [T], of the teacher, over the same supports.
        coefficient: weight of the teacher.

    Raises:
        ValueError: the arrays differ in shape or are not one-dimensional.
    """
    _require_aligned(logprobs=logprobs, teacher=teacher)
    return coefficient * (teacher.astype(np.float64) - logprobs)


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


def group_advantages(scores: FloatArray, estimator: GroupAdvantage, deviation: float = 0.0) -> FloatArray:
    """Return the advantage of each response over the other responses to its prompt, as its shape, of sum 0.

    ``leave_one_out``: ``s[i] - mean(s[j], j != i)``, whose baseline does not depend on the response itself (Kool et al.
    2019, "Buy 4 REINFORCE samples, get a baseline for free!"; for language models RLOO: Ahmadian et al. 2024, arXiv
    2402.14740). ``standardised``: ``(s[i] - mean(s)) / (std(s) + 1e-4)`` (GRPO: Shao et al. 2024, arXiv
    2402.03300, section 4.1.2), with the unbiased deviation, as in TRL. ``centred``: ``s[i] - mean(s)``, which does not
    favour prompts whose scores are nearly alike (Dr. GRPO: Liu et al. 2025, arXiv 2503.20783, section 3); it is
    ``(n - 1) / n`` times the first. ``batch_standardised``: ``(s[i] - mean(s)) / (deviation + 1e-4)``, as TRL's
    ``scale_rewards = "batch"``. ``max_rl``: ``(s[i] - mean(s)) / mean(s)``, or 0 where the mean is not positive, for
    scores that are not negative: rare successes count most (Tajwar et al. 2026, arXiv 2602.02710).

    Args:
        scores: float32 [n], of all responses to one prompt; at least two. Or float32 [K, n], their returns to go by
            turns: each turn has a mean of its own, and all of a group have one divisor, the largest of the turns'
            deviations, or the mean of the first turns.
        estimator: one of the five.
        deviation: of the scores of the whole batch, for ``batch_standardised``.

    Raises:
        ValueError: there are fewer than two, or the estimator is unknown.
    """
    n = scores.shape[-1]
    if n < 2:
        raise ValueError(f"a response is compared with others of its group, which needs two of them, not {n}")
    exact = scores.astype(np.float64)
    means = exact.mean(axis=-1, keepdims=True)
    centred = exact - means
    if estimator == "leave_one_out":
        advantages = centred * (n / (n - 1))
    elif estimator == "standardised":
        advantages = centred / (exact.std(ddof=1, axis=-1).max() + GROUP_EPSILON)
    elif estimator == "batch_standardised":
        advantages = centred / (deviation + GROUP_EPSILON)
    elif estimator == "max_rl":
        mean = means.flat[0]
        advantages = centred / mean if mean > 0 else np.zeros_like(exact)
    elif estimator == "centred":
        advantages = centred
    else:
        raise ValueError(
            f"the advantage in a group must be {', '.join(map(repr, get_args(GroupAdvantage)))}, not {estimator!r}"
        )
    return np.asarray(advantages, np.float32)


def zero_filled(returns: Sequence[FloatArray]) -> FloatArray:
    """Return the returns to go of n responses by turns, float32 [K, n], of K turns at most; 0 after a response's last.

    A response that has ended earns nothing more. Compared with all n of them (:func:`group_advantages`), a turn has a
    baseline that its own action does not change, though that decides which turns there will be: the policy gradient
    stays unbiased. Two others are not, and are not offered. A mean over the responses that still go on weighs a turn by
    how many they are. A sum, over the turns from each on, of rewards standardised by turn subtracts as many baselines
    as there are turns left, so it favours to stop where rewards are positive.

    Args:
        returns: float32 [k] of each response, from each of its k turns on.
    """
    table = np.zeros((max(map(len, returns), default=0), len(returns)), np.float32)
    for column, row in zip(table.T, returns, strict=True):
        column[: len(row)] = row
    return table


@dataclass(frozen=True, slots=True)
@validated()
class FixedKL:
    """A constant KL coefficient."""

    coefficient: NonNegative

    def after(self, kl: float, samples: int) -> FixedKL:
        del kl, samples
        return self


@dataclass(frozen=True, slots=True)
@validated()
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

    initial: Positive
    target: Positive = 6.0
    horizon: Positive = 10_000.0

    @property
    def coefficient(self) -> float:
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


def _require_aligned(**arrays: FloatArray | BoolArray) -> None:
    shapes = {name: array.shape for name, array in arrays.items()}
    if len(set(shapes.values())) != 1 or any(len(shape) != 1 for shape in shapes.values()):
        raise ValueError(f"expected one-dimensional arrays of one length, got {shapes}")


@dataclass(frozen=True, slots=True, eq=False)
class TopLogprobs:
    """A teacher's log-probs for one response of n tokens, and for its k likeliest ids at each of them.

    A scorer returns it in place of the log-probs where a loss learns the teacher's distribution. It takes ``8 k + 8``
    bytes a token.

    Attributes:
        tokens: float32 [n], of the response's tokens, over their supports.
        ids: int32 [n, k], the likeliest of the vocabulary, the likeliest first.
        top: float32 [n, k + 1], their log-probs over the vocabulary, and one of all other ids together.

    Raises:
        ProtocolError: the arrays have other shapes or types.
    """

    tokens: FloatArray
    ids: IntArray
    top: FloatArray

    def __post_init__(self) -> None:
        n, k = self.ids.shape if self.ids.ndim == 2 else (-1, 0)
        shapes = self.tokens.shape == (n,) and self.top.shape == (n, k + 1) and k > 0
        if not shapes or (self.tokens.dtype.kind, self.ids.dtype.kind, self.top.dtype.kind) != ("f", "i", "f"):
            raise ProtocolError(
                "TopLogprobs of n tokens are floats [n], integers [n, k] and floats [n, k + 1]; got "
                f"{described(self.tokens)}, {described(self.ids)} and {described(self.top)}"
            )


class TokenRewards(float):
    """The rewards of the tokens of one response; as a number, their sum.

    A scorer returns it in place of a number where it knows which tokens earned the score, as a process reward model
    does. Stages that estimate the advantage of each token use the rewards where they stand; all others use the sum.

    Args:
        rewards: float [n], for a response of n tokens.
        terms: of several rewards, as of :class:`NamedScores`, where the sum of each is its score.

    Attributes:
        rewards: float32 [n]; not to be written to.
        terms: weight and score of each reward that applies, by name; empty for a single reward.

    Raises:
        ValueError: the rewards are no numbers in one row.

    Example:
        >>> score = TokenRewards.at(4, {1: 0.5, -1: 2.0})
        >>> float(score), score.rewards.tolist()
        (2.5, [0.0, 0.5, 0.0, 2.0])
    """

    __slots__ = ("rewards", "terms")

    rewards: FloatArray
    terms: Mapping[str, tuple[float, float]]

    def __new__(
        cls, rewards: Iterable[SupportsFloat] | FloatArray, terms: Mapping[str, tuple[float, float]] | None = None
    ) -> Self:
        given = np.asarray(rewards if isinstance(rewards, np.ndarray) else list(rewards))
        if given.ndim != 1 or (given.dtype.kind not in "fiub" and len(given)):
            raise ValueError(f"rewards of tokens are numbers in one row, one for each token; got {given!r:.200}")
        with np.errstate(over="ignore"):  # a number that is no finite float32 drops its rollout later, by name
            values = given.astype(np.float32)
            score = super().__new__(cls, values.sum(dtype=np.float64))
        values.flags.writeable = False
        score.rewards, score.terms = values, dict(terms or {})
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

    @classmethod
    def by_turn(cls, finish: Finish, rewards: Mapping[int, SupportsFloat], rest: float = 0.0) -> Self:
        """Return the rewards of some turns of a response, each at its turn's last token, and ``rest`` at the very last.

        A negative number counts from the end: -1 is the last turn.

        Raises:
            ValueError: a number is of no turn of the response.
        """
        length = len(finish.response)
        ends = [*(turn.end for turn in finish.answered if turn.end < length), length]
        at = {length - 1: rest}
        for turn, reward in rewards.items():
            if not -len(ends) <= turn < len(ends):
                raise ValueError(
                    f"there is no turn {turn} in a response of {counted(len(ends), 'turn')} to be rewarded"
                )
            at[ends[turn] - 1] = at.get(ends[turn] - 1, 0.0) + float(reward)
        return cls.at(length, at)

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self.rewards, self.terms)

    def __repr__(self) -> str:
        return f"TokenRewards(sum={float(self)}, tokens={len(self.rewards)})"


class NamedScores(float):
    """The scores of several rewards of one response; as a number, their weighted sum.

    Attributes:
        terms: weight and score of each reward that applies, by name.

    Example:
        >>> score = NamedScores({"right": (1.0, 0.5), "short": (0.5, 2.0)})
        >>> float(score), score.terms["short"]
        (1.5, (0.5, 2.0))
    """

    __slots__ = ("terms",)

    terms: Mapping[str, tuple[float, float]]

    def __new__(cls, terms: Mapping[str, tuple[float, float]]) -> Self:
        score = super().__new__(cls, sum(weight * score for weight, score in terms.values()))
        score.terms = dict(terms)
        return score

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return type(self), (self.terms,)


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


_LEAST_DEVIATION: Final = float(np.finfo(np.float32).tiny)
"""The least divisor of scores: a smaller one would make them infinite in float32."""


@dataclass(frozen=True, slots=True)
class RunningMoments:
    """Running moments of all scores so far (Chan, Golub, LeVeque 1979, equation 2.1).

    Attributes:
        count: number of scores.
        mean: of the scores.
        squares: the sum of their squared deviations from the mean.

    Example:
        >>> RunningMoments().after(np.array([1, 3], np.float32)).after(np.array([5], np.float32))
        RunningMoments(count=3, mean=3.0, squares=8.0)
    """

    count: int = 0
    mean: float = 0.0
    squares: float = 0.0

    @property
    def std(self) -> float:
        """The unbiased standard deviation; 1 if there are fewer than two scores, or all are equal in float32."""
        deviation = math.sqrt(self.squares / (self.count - 1)) if self.count > 1 else 0.0
        return deviation if deviation >= _LEAST_DEVIATION else 1.0

    def after(self, scores: FloatArray) -> RunningMoments:
        if not len(scores):
            return self
        batch = scores.astype(np.float64)
        mean, count = float(batch.mean()), self.count + len(batch)
        shift = mean - self.mean
        squares = float(np.square(batch - mean).sum()) + shift * shift * self.count * len(batch) / count
        return RunningMoments(count, self.mean + shift * len(batch) / count, self.squares + squares)


@dataclass(frozen=True, slots=True)
@validated()
class ScoreShaping:
    """The map from a score to the reward of a response; the defaults are the identity.

    Attributes:
        norm: subtract the running mean of all scores, this batch's included, and divide by their standard deviation.
        clip: bound the (normalised) score to ``-clip .. clip``; ``inf`` does not.
        scale: multiplies the result.
        missing_eos_penalty: subtracted for responses that ended at the length cap, not by a stop, as in TRL.
        long_from, long_to: lengths in sampled tokens between which a penalty grows from 0 to ``long_penalty``, as in
            DAPO (Yu et al. 2025, arXiv 2503.14476, equation 13); equal ones: no penalty.
        long_penalty: subtracted from the reward of a response of ``long_to`` tokens.
        moments: of all scores so far; only kept with ``norm``.

    Raises:
        ValueError: a value is out of range.
    """

    norm: bool = False
    clip: Limit = math.inf
    scale: Positive = 1.0
    missing_eos_penalty: NonNegative = 0.0
    long_from: Count = 0
    long_to: Count = 0
    long_penalty: NonNegative = 1.0
    moments: RunningMoments = field(default_factory=RunningMoments)

    def __post_init__(self) -> None:
        if self.long_from > self.long_to:
            raise ValueError(
                f"the penalty on long responses grows between two lengths, long_from = {self.long_from} and long_to = "
                f"{self.long_to}: expected 0 <= long_from <= long_to"
            )

    def after(self, scores: FloatArray) -> ScoreShaping:
        return replace(self, moments=self.moments.after(scores)) if self.norm else self

    @property
    def slope(self) -> float:
        """By how much the reward of a response grows with its score where nothing is clipped.

        It multiplies rewards at single tokens (:class:`~oppo.returns.TokenRewards`). Centring, clipping and
        penalties act on the whole response; the last token has what they change.
        """
        return self.scale / self.moments.std if self.norm else self.scale

    def shaped(self, scores: FloatArray, stopped: BoolArray, lengths: NDArray[np.int64]) -> FloatArray:
        """Return the rewards of whole responses: float32 [n].

        Args:
            scores: float32 [n].
            stopped: bool [n], whether the response ended by a stop token or text.
            lengths: int64 [n], sampled tokens of the response: a tool's answer is not the policy's to shorten.
        """
        rewards: NDArray[np.float64] = scores.astype(np.float64)
        if self.norm:
            rewards = (rewards - self.moments.mean) / self.moments.std
        rewards = rewards.clip(-self.clip, self.clip) * self.scale
        rewards = np.where(stopped, rewards, rewards - self.missing_eos_penalty)
        if self.long_to > self.long_from:
            beyond = (lengths - self.long_from) / (self.long_to - self.long_from)
            rewards = rewards - self.long_penalty * beyond.clip(0, 1)
        return rewards.astype(np.float32)


RatioBase: TypeAlias = Literal["behaviour", "proximal"]
TokenWeight: TypeAlias = Literal["none", "truncated", "mask"]
Level: TypeAlias = Literal["token", "sequence", "product"]

CAP = 2.0  # the bound of truncated importance sampling, as in Yao et al. 2025
TOKEN_BAND = (0.5, 5.0)  # the mismatches of tokens that a mask keeps, as in IcePop (Zhao et al. 2025)

SEQUENCE_BAND = (0.9, 1.1)
"""The mismatches of rollouts that a mask keeps: a geometric mean over hundreds of tokens varies far less than a token.

Ours; published bands guard against differences between two engines, and are tighter than a version of the weights.
"""

PRODUCT_BAND = (0.0, 3.0)
"""The products of a rollout's mismatches that a mask keeps, as in TRL 1.16 (``sequence_mask``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
@validated(ConfigError)
class ImportanceCorrection:
    """Learning from tokens that older weights sampled: the base of the ratio, and the weight of a token.

    Older weights wrote a part of a deferred rollout. With current ``pi``, behaviour ``mu`` (the weights that sampled a
    token) and proximal ``pi'`` (the weights at the beginning of the update), let ``m = pi' / mu`` be the *mismatch* of
    a token. The clipped loss takes a ratio, and multiplies each token's loss by a constant weight:

    ============= ======================== ========================
    weight        ratio base ``mu``        ratio base ``pi'``
    ============= ======================== ========================
    (ratio)       ``pi / mu``              ``pi / pi'``
    ``none``      1                        1
    ``truncated`` ``min(m, c) / m``        ``min(m, c)``
    ``mask``      1 if low <= m <= high    m if low <= m <= high
    ============= ======================== ========================

    Ratio times weight is the same in both columns where ``m`` is of what the ratio is of, but for ``none``. With the
    base ``mu`` the clip band lies around the old weights, so a token that later updates moved out of the band teaches
    nothing; with ``pi'`` it lies around the weights that are being updated (the decoupled objective).

    With ``level = "sequence"``, ``m`` is the geometric mean of a response's mismatches, which does not drift with the
    length as their product does; with ``level = "product"`` it is that product, which is unbiased for whole responses,
    and has a variance that grows with the length. The ratio remains the loss's: over ``mu`` the weight of the product
    is ``min(m, c)`` over the mismatch of the token, or over the geometric mean where the ratio is one, as in GSPO. Each
    conversation of an agent is a response here.

    With ``k3``, a rollout whose mismatches are further from 1 than this, by the mean of ``m - 1 - log m`` over its
    tokens, has weight 0, whatever the other weights are: this estimates KL(mu || pi').

    A masked token counts in the mean of the loss with loss 0, so masking does not enlarge the gradients of the others.
    The value loss, the entropy bonus and a KL in the loss keep every token.

    Where the trainer's backend decodes, a token of the current version has ``m = 1``, exactly: in a run that defers
    nothing, every choice here makes the same update, bit for bit. Where another engine does, ``m`` holds the difference
    between the two as well.

    The default is plain PPO.

    Attributes:
        ratio_base: ``behaviour``: the ratio is over the policy that sampled a token (Schulman et al. 2017).
            ``proximal``: over the policy before the update (decoupled PPO: Hilton et al. 2022, arXiv 2110.00641,
            equation 3; for language models AReaL: Fu et al. 2025, arXiv 2505.24298, equation 5).
        weight: ``none``. ``truncated``: importance weights, at most ``cap`` (IMPALA: Espeholt et al. 2018, arXiv
            1802.01561; for language models truncated importance sampling: Yao et al. 2025, "Your efficient RL framework
            secretly brings you off-policy RL training"). ``mask``: importance weights, and 0 outside of ``low .. high``
            (by token, IcePop: Zhao et al. 2025, "Small leak can sink a great ship"; by sequence, the off-policy
            sequence masking of DeepSeek-V3.2, arXiv 2512.02556, section 3.1, which masks rollouts of negative advantage
            only).
        level: ``token``; ``sequence``: by the rollout's geometric mean (GSPO: Zheng et al. 2025, arXiv 2507.18071,
            equation 7); or ``product`` (Liu et al. 2025, "When speed kills stability: demystifying RL collapse from the
            inference-training mismatch"), whose band masks long rollouts more often than short ones.
        k3: a rollout with a larger mean ``m - 1 - log m`` is masked; ``None``: none is.
        cap: c, at least 1.
        low, high: the band of ``mask``, around 1; ``None``: :data:`TOKEN_BAND`, :data:`SEQUENCE_BAND` or
            :data:`PRODUCT_BAND`.

    Raises:
        ConfigError: a value is out of range: 1 must be neither truncated nor masked.
    """

    ratio_base: RatioBase = "behaviour"
    weight: TokenWeight = "none"
    level: Level = "token"
    cap: AtLeastOne = CAP
    low: Fraction | None = None
    high: AtLeastOne | None = None
    k3: Positive | None = None

    @property
    def weighs(self) -> bool:
        return self.weight != "none" or self.k3 is not None

    @property
    def by_row(self) -> bool:
        """Whether the weight of a token depends on the others of its rollout."""
        return self.k3 is not None or (self.weight != "none" and self.level != "token")

    @property
    def needs_proximal(self) -> bool:
        """Whether this differs from plain PPO, so that proximal log-probs are needed."""
        return self.ratio_base != "behaviour" or self.weighs

    @property
    def band(self) -> tuple[float, float]:
        """The mismatches that a mask keeps."""
        low, high = {"token": TOKEN_BAND, "sequence": SEQUENCE_BAND, "product": PRODUCT_BAND}[self.level]
        return low if self.low is None else self.low, high if self.high is None else self.high
