"""Advantages: the objective of a batch, GAE, comparison within groups or with the mean of a role, distillation."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Literal, SupportsFloat, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray

from oppo.declared import Fraction, NonNegative, Positive, validated
from oppo.errors import ConfigError, ProtocolError
from oppo.events import Batch, BoolArray, Drop, FloatArray, Prompt
from oppo.returns import (
    AdaptiveKL,
    Credit,
    FixedKL,
    GroupAdvantage,
    KLEstimator,
    Over,
    RunningMoments,
    ScoreShaping,
    distillation_advantages,
    gae,
    group_advantages,
    kl_estimate,
    returns_to_go,
    shaped_rewards,
    whiten,
    zero_filled,
)
from oppo.stages.batch import LARGEST, NONFINITE, BatchStage, ScoredRollouts, flat
from oppo.stages.generate import Generate

KLControl: TypeAlias = FixedKL | AdaptiveKL

OF_THE_REFERENCE = frozenset({"objective/kl", "objective/kl_coef", "objective/non_score_reward"})
"""The metrics that are absent without a reference."""

LARGEST_SUM = LARGEST / 4
"""Of the sizes of a rollout's rewards and values: returns are at most their sum and 3 values, and the advantage over
the others of a group is at most 4 times the return."""


@dataclass(frozen=True, slots=True, eq=False)
class Objective:
    """The objective of a batch of N rollouts and T tokens.

    Attributes:
        shaped: float32 [N], the shaped scores.
        kl: float32 [T], an estimate of each token's KL to the reference, in nats, of the proximal policy if its
            log-probs are known; 0 for a token that was not sampled, and without a reference.
        coefficient: of the KL penalty.
        earned: float32 [T], the part of a shaped score that its tokens are known to have earned; ``None`` if that is
            known of no response.
    """

    shaped: FloatArray
    kl: FloatArray
    coefficient: float
    earned: FloatArray | None = None

    def rewards(self, batch: Batch) -> FloatArray:
        """Return the reward of each token, float32 [T]: its share of the score, less the KL penalty.

        The last sampled token of a response earns the rest of the score: all of it, unless the scorer said more.
        """
        return flat(
            [
                shaped_rewards(
                    float(score),
                    self.kl[row],
                    self.coefficient,
                    batch.sampled[row],
                    None if self.earned is None else self.earned[row],
                )
                for score, row in zip(self.shaped, batch.rows(), strict=True)
            ]
        )

    def metrics(self, batch: Batch) -> dict[str, float]:
        """Return the means over the rollouts of a batch, by TRL's names; none of an empty one."""
        if not len(batch):
            return {}
        mean_kl, firsts = self.mean_kl(batch), batch.firsts
        shaped, scores = float(np.mean(self.shaped[firsts])), batch.scores[firsts]
        metrics = {
            "objective/kl": mean_kl,
            "objective/kl_coef": self.coefficient,
            "objective/entropy": _mean_sum(batch, -batch.logprobs),
            "objective/non_score_reward": -self.coefficient * mean_kl,
            "objective/rlhf_reward": shaped - self.coefficient * mean_kl,
            "objective/scores": float(np.mean(scores)),
            "objective/scores_std": float(np.std(scores)),
            "objective/shaped_scores": shaped,
        }
        absent = OF_THE_REFERENCE if batch.reference is None else frozenset[str]()
        return {name: value for name, value in metrics.items() if name not in absent}

    def mean_kl(self, batch: Batch) -> float:
        """Return the mean KL of the rollouts of a batch, nats per rollout."""
        return _mean_sum(batch, self.kl)


def _mean_sum(batch: Batch, each: FloatArray, dtype: DTypeLike = np.float32) -> float:
    # The mean over rollouts of the sums over the sampled tokens of all their conversations.
    at, rollouts = batch.sampled_rows(), batch.conversations()
    tokens = [at[rows[0]] if len(rows) == 1 else np.concatenate([at[row] for row in rows]) for rows in rollouts]
    sums = [each[positions].sum(dtype=dtype) for positions in tokens]
    return float(np.mean(sums, dtype=np.float64))


class AdaptiveObjective(BatchStage):
    """An advantage stage whose shaping of scores and KL coefficient adapt to each batch.

    A rollout whose rewards and values are too large for float32 is dropped before anything is estimated: whitening or a
    comparison would spread it.

    Attributes:
        mask_truncated: leave responses that ended at the length cap out of the loss. They stay in what others are
            compared with: the baseline of a group, the moments of whitening.
        kl_estimator: of each token's KL to the reference.
        shaping: of the scores, before they are rewards; replaced by its successor after each batch.
        control: of the coefficient of the KL penalty; replaced likewise.
        distill: weight of the log-ratio of a teacher to the policy, which is added to the advantage of each sampled
            token when all else has been estimated (:func:`oppo.returns.distillation_advantages`); of the proximal
            policy if its log-probs are known. It needs ``teacher=``.
    """

    kl_estimator: KLEstimator
    shaping: ScoreShaping
    control: KLControl
    mask_truncated: bool = False
    distill: float = 0.0

    @property
    def refers(self) -> bool:
        """Whether log-probs of a reference are needed: there is a KL penalty."""
        return self.control.coefficient > 0

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        lacking = self.distill > 0 and "teacher" not in named
        fault = f"has distill = {self.distill:g}, which needs a teacher: connect teacher=stream, or leave distill out"
        return [*super().faults(stages, named), *([fault] if lacking else [])]

    def batch_of(self, scored: ScoredRollouts) -> Batch:
        """Return the training batch of a step's rollouts, in their order, with the teacher's part and the loss mask."""
        batch = self._taught(super().batch_of(scored))
        if not self.mask_truncated:
            return batch
        return replace(batch, sampled=batch.sampled & np.repeat(~truncated(batch), np.diff(batch.offsets)))

    def unfit(self, batch: Batch) -> Sequence[Drop]:
        if not len(batch):
            return []
        with np.errstate(over="ignore", invalid="ignore"):
            objective = self._objective(batch, self.shaping.after(batch.scores[batch.firsts]))
            tokens = np.abs(objective.coefficient * objective.kl.astype(np.float64))
            tokens += 0 if objective.earned is None else np.abs(objective.earned)
            tokens += np.abs(self._lesson(batch))
            rewards = np.add.reduceat(tokens, batch.offsets[:-1]) + np.abs(objective.shaped)
            values = 0 if batch.values is None else np.where(batch.sampled, np.abs(batch.values), 0.0)
            totals = rewards + np.add.reduceat(np.broadcast_to(values, len(tokens)), batch.offsets[:-1])
        return [
            Drop(rollout, f"{NONFINITE} {'advantage' if rewards[row] <= LARGEST_SUM else 'reward'}", nonfinite=True)
            for row, rollout in enumerate(batch.rollouts)
            if not totals[row] <= LARGEST_SUM
        ]

    def objective(self, batch: Batch) -> Objective:
        """Return the objective of a batch without advantages, and adapt to it.

        The scores are shaped with the moments of this batch; the coefficient has learned from the batches before it. A
        rollout counts once in both, whatever its conversations.
        """
        firsts = batch.firsts
        self.shaping = self.shaping.after(batch.scores[firsts])
        objective = self._objective(batch, self.shaping)
        if len(batch):
            self.control = self.control.after(objective.mean_kl(batch), len(firsts))
        return objective

    def _objective(self, batch: Batch, shaping: ScoreShaping) -> Objective:
        kl, at = np.zeros(len(batch.tokens), np.float32), batch.sampled
        if batch.reference is not None:
            kl[at] = kl_estimate(_current(batch)[at], batch.reference[at], self.kl_estimator)
        lengths, stopped = np.array([len(row) for row in batch.sampled_rows()], np.int64), ~truncated(batch)
        for rows in batch.conversations():  # which have one reward, with the penalties of the longest
            lengths[rows], stopped[rows] = lengths[rows].max(), stopped[rows].all()
        return Objective(
            shaping.shaped(batch.scores, stopped, lengths),
            kl,
            self.control.coefficient,
            None if batch.token_rewards is None else np.float32(shaping.slope) * batch.token_rewards,
        )

    def _lesson(self, batch: Batch) -> NDArray[np.float64]:
        lesson = np.zeros(len(batch.tokens))
        if batch.teacher is not None:
            at = batch.sampled & ~np.isnan(batch.teacher)
            lesson[at] = distillation_advantages(_current(batch)[at], batch.teacher[at], self.distill)
        return lesson

    def _taught(self, batch: Batch) -> Batch:
        if not len(batch) or batch.teacher is None:
            return batch
        kl, at = np.zeros(len(batch.tokens), np.float32), batch.sampled & ~np.isnan(batch.teacher)
        kl[at] = kl_estimate(_current(batch)[at], batch.teacher[at])
        task = 0.0 if batch.advantages is None else batch.advantages
        return replace(
            batch,
            advantages=(task + self._lesson(batch)).astype(np.float32),
            metrics={**batch.metrics, "objective/teacher_kl": _mean_sum(batch, kl, np.float64)},
        )

    def state_dict(self) -> Mapping[str, Any]:
        return {"kl": self.control.coefficient, "moments": asdict(self.shaping.moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore both; a fixed coefficient stays."""
        if isinstance(self.control, AdaptiveKL):
            self.control = replace(self.control, initial=float(state["kl"]))
        self.shaping = replace(self.shaping, moments=RunningMoments(**state["moments"]))


def _current(batch: Batch) -> FloatArray:
    return batch.logprobs if batch.proximal is None else batch.proximal


def controlled(kl: SupportsFloat | KLControl) -> KLControl:
    """Return the controller of a KL penalty: ``kl`` itself, or a fixed one for a number."""
    if not isinstance(kl, SupportsFloat | FixedKL | AdaptiveKL):
        raise ConfigError(f"kl must be a number, or a controller such as oppo.returns.AdaptiveKL, not {kl!r}")
    return kl if isinstance(kl, FixedKL | AdaptiveKL) else FixedKL(float(kl))


def truncated(batch: Batch) -> BoolArray:
    """Return whether each response ended at the length cap: bool [N]."""
    return np.array([reason == "length" for reason in batch.reasons], np.bool_)


@dataclass(eq=False)
@validated(ConfigError)
class GAE(AdaptiveObjective):
    """Joins the results of the scorers and estimates advantages (Schulman et al. 2016, arXiv 1506.02438).

    The reward of a token is ``-kl * (estimate of its KL to the reference)``, plus the shaped score on the last sampled
    token, or what each token earned of it if the scorer says so (:class:`~oppo.returns.TokenRewards`); the KL is
    that of the proximal policy if its log-probs are connected. Over a conversation all this runs over its sampled
    tokens, one decay each. A rollout with a result or an estimate that is not finite is dropped and does not affect the
    others.

    It has the named inputs of :class:`BatchStage`. Without a critic, ``value=``, the advantage of a token is the
    discounted sum of the rewards from it on, as in REINFORCE++ (Hu 2025, arXiv 2501.03262).

    Attributes:
        gamma: discount.
        lam: bias-variance trade of the estimator.
        lam_value: the same of the returns, which the critic learns; ``None``: as the advantages (decoupled GAE: Yuan et
            al. 2025, arXiv 2503.01491, section 3.2).
        lam_alpha: adapts ``lam`` to the length: ``1 - 1 / (lam_alpha * n)``, at least 0, for a response of n sampled
            tokens (VAPO: Yue et al. 2025, arXiv 2504.05118, section 4.2); ``None``: it is the same for all.
        kl: coefficient of the KL penalty: a number, or a controller that adapts it to a target.
        kl_estimator: ``k1``, ``k2`` or ``k3`` (Schulman, "Approximating KL divergence", 2020).
        shaping: of the scores, before they are rewards; replaced by its successor after each batch.
        whiten_rewards: scale the rewards of a batch to unit variance, their mean kept.
        whiten_advantages: scale the advantages of a batch to zero mean and unit variance.
        bootstrap_truncated: the value of the state after a response that ended at the length cap is what the critic
            gives, not 0, as if the response went on (partial-episode bootstrapping: Pardo et al. 2018, "Time Limits in
            Reinforcement Learning", arXiv 1712.00378, section 3).
        mask_truncated: leave such responses out of the loss; see :class:`AdaptiveObjective`.
        distill: weight of a teacher; see :class:`AdaptiveObjective`. It is added after whitening.
        over: what the estimate runs over: ``tokens``, or ``turns``, each one action with the sum of its tokens' rewards
            and the value before the first of them, whose advantage and return all its tokens have; ``gamma`` and
            ``lam`` then decay by turns (Turn-PPO, arXiv 2512.17008).

    Raises:
        ConfigError: a value is out of range, there is no such estimator, or truncated responses are both bootstrapped
            and left out.
        ValueError: the coefficient of the KL penalty is negative or not finite.
    """

    gamma: Fraction = 1.0
    lam: Fraction = 0.95
    lam_value: Fraction | None = field(default=None, kw_only=True)
    lam_alpha: Positive | None = field(default=None, kw_only=True)
    kl: SupportsFloat | KLControl = 0.05
    kl_estimator: KLEstimator = "k1"
    shaping: ScoreShaping = field(default_factory=ScoreShaping)
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    bootstrap_truncated: bool = False
    mask_truncated: bool = False
    distill: NonNegative = 0.0
    over: Over = field(default="tokens", kw_only=True)
    control: KLControl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.control = controlled(self.kl)
        if self.bootstrap_truncated and self.mask_truncated:
            raise ConfigError(
                "bootstrap_truncated says what a truncated response learns, and mask_truncated leaves it out of the "
                "loss: leave one of the two out"
            )

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Report a reference, a teacher, a critic or turns that are needed, and not there."""
        needing = {
            "bootstrap_truncated": self.bootstrap_truncated,
            "lam_value": self.lam_value is not None,
            "lam_alpha": self.lam_alpha is not None,
        }
        lacking = [name for name, needs in needing.items() if needs and "value" not in named]
        faults = [f"has {name}, which needs a critic: connect value=stream, or leave {name} out" for name in lacking]
        return [*super().faults(stages, named), *faults, *_without_turns(stages, "over", self.over)]

    def estimated(self, batch: Batch) -> Batch:
        """Return the batch with rewards, advantages and returns, and update the KL controller from it."""
        objective = self.objective(batch)
        rewards = objective.rewards(batch)
        if self.whiten_rewards:
            rewards = whiten(rewards, batch.sampled, shift_mean=False)
        advantages, returns = self._estimates(batch, rewards)
        return replace(
            batch,
            rewards=rewards,
            advantages=whiten(advantages, batch.sampled) if self.whiten_advantages else advantages,
            returns=returns,
            metrics=objective.metrics(batch),
        )

    def _estimates(self, batch: Batch, rewards: FloatArray) -> tuple[FloatArray, FloatArray | None]:
        advantages, returns = np.zeros((2, len(batch.tokens)), np.float32)
        for row, firsts, last_value in zip(
            batch.sampled_rows(), self._firsts(batch), self._last_values(batch), strict=True
        ):
            lengths = np.diff(firsts, append=len(row))
            earned = np.add.reduceat(rewards[row], firsts, dtype=np.float64).astype(np.float32)
            if batch.values is None:
                advantages[row] = np.repeat(returns_to_go(earned, self.gamma), lengths)
                continue
            lam = self.lam if self.lam_alpha is None else max(0.0, 1.0 - 1.0 / (self.lam_alpha * len(firsts)))
            estimate = partial(gae, earned, batch.values[row[firsts]], self.gamma, last_value=last_value)
            advantage, target = estimate(lam)
            if self.lam_value is not None:
                target = estimate(self.lam_value)[1]
            advantages[row], returns[row] = np.repeat(advantage, lengths), np.repeat(target, lengths)
        return advantages, None if batch.values is None else returns

    def _firsts(self, batch: Batch) -> Sequence[NDArray[np.int64]]:
        # Where an action begins among the sampled tokens of its row.
        if self.over == "tokens":
            return [np.arange(len(row)) for row in batch.sampled_rows()]
        lengths = [[0, *map(len, turns)] for turns in sampled_turns(batch)]
        return [np.cumsum(row[:-1])[np.array(row[1:]) > 0] for row in lengths]

    def _last_values(self, batch: Batch) -> Sequence[float]:
        if not self.bootstrap_truncated:
            return [0.0] * len(batch)
        if batch.last_values is None:
            raise ProtocolError(
                "bootstrap_truncated needs the critic's value of the state after the last token: expected n + 1 values "
                "of a response of n tokens, as oppo.hf.ValueModel gives, and got n; leave bootstrap_truncated out, or "
                "return one more"
            )
        return [float(value) for value in np.where(truncated(batch), batch.last_values, 0.0)]


def sampled_turns(batch: Batch) -> Sequence[Sequence[NDArray[np.int64]]]:
    # As `Batch.sampled_rows()`, split where an environment answered; a gap in `sampled` alone ends no turn.
    found = []
    for row, turns, at in zip(batch.rows(), batch.answered or [()] * len(batch), batch.sampled_rows(), strict=True):
        ends = [row.start + turn.end for turn in turns]
        found.append(np.split(at, np.searchsorted(at, [end for end in ends if end < row.stop])))
    return found


def _without_turns(stages: Sequence[object], name: str, value: str) -> Sequence[str]:
    sources = [stage for stage in stages if isinstance(stage, Generate)]
    if value in {"tokens", "response"} or not sources or any(stage.environment is not None for stage in sources):
        return []
    return [f"has {name} = {value!r}, and nothing answers turns: give Generate an environment, or leave {name} out"]


ALONE = "left alone in its group"
"""Reason of a drop for a response whose siblings were all dropped: it cannot be compared."""

ASTRAY = "a branch of a response that is not trained"
"""Reason of a drop for a further conversation of a sample whose first one has no advantage."""


@dataclass(eq=False)
@validated(ConfigError)
class GroupRelative(AdaptiveObjective):
    """Joins the results of the scorers and compares the responses to each prompt with one another.

    The return of a response is its shaped score minus ``kl`` times its KL to the reference. Its advantage, the same for
    each sampled token, follows from the returns of its group; rewards at tokens count by their sum. The batch has no
    critic's returns. A response that is dropped, or has a result or a return that is not finite, leaves its group; one
    left alone is dropped too. An agent with several conversations is compared once, by the score of the first one and
    the KL of all, and all have its advantage; one with roles once in each, with the same role of the others. It has the
    named inputs of :class:`BatchStage`.

    With ``credit = "turns"`` each turn has a return to go, of its rewards and those of later turns, and is compared
    with the same turn of all responses of its group (:func:`oppo.returns.zero_filled`). With ``credit = "state"`` a
    turn has the advantage of its response and, by its return to go, that over all turns of the group in the same state,
    if there is another (GiGPO: Feng et al. 2025, arXiv 2505.10978). With both, a response alone in its group has
    advantage 0 and is not dropped, and further conversations of an agent have the advantage of the first turn.

    Attributes:
        advantage: ``leave_one_out`` (RLOO), ``standardised`` (GRPO), ``centred`` (Dr. GRPO), ``batch_standardised`` or
            ``max_rl``; see :func:`oppo.returns.group_advantages`. ``each_reward`` standardises each of several named
            rewards in its group, and whitens their weighted sum over the batch, so that none drowns in the deviation of
            another (GDPO: Liu et al. 2026, arXiv 2601.05242).
        kl: coefficient of the KL penalty in the return of a response, as in RLOO: a number, or a controller that adapts
            it to a target. GRPO has its KL in the loss instead, ``ClippedLoss.kl``: standardising gives a KL the same
            size at any coefficient, and where scores tie only the KL is left. Both need a reference.
        kl_estimator: ``k1``, ``k2`` or ``k3`` (Schulman, "Approximating KL divergence", 2020).
        shaping: of the scores, before they are rewards; replaced by its successor after each batch.
        mask_truncated: leave responses that ended at the length cap out of the loss; see :class:`AdaptiveObjective`.
        distill: weight of a teacher; see :class:`AdaptiveObjective`. It is added after the comparison.
        credit: what is compared: the ``response``, its ``turns``, or the turns in a ``state``.
        gamma: discount of the rewards of later turns.

    Raises:
        ConfigError: there is no such estimator, or ``kl`` is no coefficient or would be standardised; or scores are
            shaped, of which ``each_reward`` knows the parts only; or it, or a ``gamma``, has no effect with ``credit``.
        ValueError: the coefficient of the KL penalty is negative or not finite.
    """

    advantage: GroupAdvantage | Literal["each_reward"] = "standardised"
    kl: SupportsFloat | KLControl = 0.0
    kl_estimator: KLEstimator = "k1"
    shaping: ScoreShaping = field(default_factory=ScoreShaping)
    mask_truncated: bool = False
    distill: NonNegative = 0.0
    credit: Credit = field(default="response", kw_only=True)
    gamma: Fraction = field(default=1.0, kw_only=True)
    control: KLControl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.control = controlled(self.kl)
        if self.credit == "response" and self.gamma != 1.0:
            raise ConfigError(
                f"gamma = {self.gamma} discounts rewards of later turns, and credit = 'response' sums them: set credit "
                "to 'turns' or 'state', or leave gamma out"
            )
        if self.credit != "response" and self.advantage == "each_reward":
            raise ConfigError(
                f"advantage = 'each_reward' compares whole responses, reward by reward, and credit = {self.credit!r} "
                "their turns: leave one of the two out"
            )
        if self.advantage == "each_reward" and self.shaping != ScoreShaping():
            raise ConfigError(
                "advantage = 'each_reward' compares rewards one by one, and the shaping changes their sum: expected "
                f"ScoreShaping(), got {self.shaping}"
            )
        if self.advantage in {"standardised", "max_rl", "each_reward"} and self.refers:
            raise ConfigError(
                f"advantage = {self.advantage!r} cannot have a KL in the reward, got kl = {self.kl}: where the scores "
                "of a group tie, only the KL is left, scaled to full size at any coefficient; put it into the "
                'loss, with algorithm.kl_in="loss" or ClippedLoss(kl=..., kl_estimator="k3"), or choose \'centred\' or '
                "'leave_one_out'"
            )

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Report a reference, a teacher or turns that are needed, and not there."""
        return [*super().faults(stages, named), *_without_turns(stages, "credit", self.credit)]

    def unfit(self, batch: Batch) -> Sequence[Drop]:
        """Return the drops of rollouts whose values may overflow float32, and of those then alone in their group."""
        drops = list(super().unfit(batch))
        gone = {drop.rollout for drop in drops}
        prompts = [response.prompt for response in batch.responses if response.prompt.rollout not in gone]
        heads = dict[tuple[int, str], Prompt]()  # a role may begin with a branch
        for each in prompts:
            if each.role or not each.branch:
                heads.setdefault(each.trajectory, each)
        sizes = Counter((each.group, each.role) for each in heads.values())
        least = 2 if self.credit == "response" else 1
        alone = {each.rollout for each in heads.values() if sizes[each.group, each.role] < least}
        compared = {each.trajectory for each in heads.values() if each.rollout not in alone}
        left = [each.rollout for each in prompts if each.trajectory not in compared]
        return [*drops, *(Drop(rollout, ALONE if rollout in alone else ASTRAY) for rollout in left)]

    def estimated(self, batch: Batch) -> Batch:
        """Return the batch with rewards and advantages, and update the KL controller from it."""
        objective = self.objective(batch)
        rewards = objective.rewards(batch)
        at, penalties = batch.sampled_rows(), np.float32(-objective.coefficient) * objective.kl
        turns = [[row] for row in at] if self.credit == "response" else sampled_turns(batch)
        earned, conversations = dict[int, FloatArray](), batch.conversations()
        for first, *further in conversations:
            by_turn = np.array([rewards[turn].sum(dtype=np.float64) for turn in turns[first]])
            by_turn[-1] += sum(penalties[at[row]].sum(dtype=np.float64) for row in further)
            earned[first] = by_turn.astype(np.float32)
        members = defaultdict[tuple[int, str], list[int]](list)
        for row in batch.firsts.tolist():
            members[batch.responses[row].prompt.group, batch.responses[row].prompt.role].append(row)
        groups = [np.array(members[group], np.int64) for group in sorted(members)]
        advantages = np.zeros(len(batch.tokens), np.float32)
        relative = self._relative(batch, earned, groups)
        for first, *further in conversations:
            for turn, advantage in zip(turns[first], relative[first], strict=True):
                advantages[turn] = advantage
            for row in further:
                advantages[at[row]] = relative[first][0]
        metrics = {**objective.metrics(batch), **_spread([objective.shaped[group] for group in groups])}
        return replace(batch, rewards=rewards, advantages=advantages, metrics=metrics)

    def _relative(
        self, batch: Batch, earned: Mapping[int, FloatArray], groups: Sequence[NDArray[np.int64]]
    ) -> Mapping[int, FloatArray]:
        # The advantage of each turn of first conversations, by row, from what the turns earned.
        if self.advantage == "each_reward":
            return dict(enumerate(_by_reward(batch, groups).reshape(-1, 1)))
        estimator, relative = self.advantage, dict[int, FloatArray]()
        returns = {row: returns_to_go(rewards, self.gamma) for row, rewards in earned.items()}
        deviation = 0.0
        if estimator == "batch_standardised" and len(returns) > 1:
            deviation = float(zero_filled([*returns.values()]).std(ddof=1, axis=-1, dtype=np.float64).max())

        def compared(values: FloatArray) -> FloatArray:
            alone = values.shape[-1] < 2
            return np.zeros_like(values) if alone else group_advantages(values, estimator, deviation)

        for group in groups:
            members = group.tolist()
            if self.credit != "state":
                table = compared(zero_filled([returns[row] for row in members]))
                relative |= {row: of_row[: len(returns[row])] for row, of_row in zip(members, table.T, strict=True)}
                continue
            whole = compared(np.array([earned[row].sum(dtype=np.float64) for row in members], np.float32))
            states = defaultdict[str, list[tuple[int, int]]](list)
            for row, of_row in zip(members, whole, strict=True):
                relative[row] = np.full(len(returns[row]), of_row, np.float32)
                for number, turn in enumerate(batch.answered[row]):
                    if not turn.key:
                        raise ProtocolError(
                            f"credit = 'state' compares turns in equal states, and turn {number} of rollout "
                            f"{batch.rollouts[row]} has no key of one: give it with the answer (get_turn_state() of a "
                            "class, TextAnswer(key=...) of a function, Answer(key=...)), or set credit = 'turns'"
                        )
                    states[turn.key].append((row, number))
            for same in states.values():
                steps = compared(np.array([returns[row][number] for row, number in same], np.float32))
                for (row, number), step in zip(same, steps, strict=True):
                    relative[row][number] += step
        return relative


def _by_reward(batch: Batch, groups: Sequence[NDArray[np.int64]]) -> FloatArray:
    if len(batch) and not batch.named_scores:
        raise ProtocolError(
            "advantage = 'each_reward' compares each of several rewards, and the scores are single numbers: expected "
            "those of oppo.Rewards, or of several [[rewards]] with names"
        )
    total, compared = np.zeros(len(batch), np.float64), np.zeros(len(batch), np.bool_)
    compared[np.concatenate([np.zeros(0, np.int64), *groups])] = True
    for weight, scores in batch.named_scores.values():
        for members in groups:
            known = members[np.isfinite(scores[members])]
            if len(known) > 1:
                total[known] += weight * group_advantages(scores[known], "standardised").astype(np.float64)
    return whiten(total.astype(np.float32), compared)


def _spread(groups: Sequence[FloatArray]) -> Mapping[str, float]:
    deviations = [float(scores.std(ddof=1, dtype=np.float64)) for scores in groups if len(scores) > 1]
    if not deviations:
        return {}
    return {
        "objective/group_std": float(np.mean(deviations)),
        "objective/frac_zero_std": float(np.mean([not deviation for deviation in deviations])),
    }


@dataclass(eq=False)
@validated(ConfigError)
class RoleBaseline(GroupRelative):
    """Compares each return with the running mean of its role, in place of the others of its group.

    ``A = R - b``, then ``b = decay b + (1 - decay) R``, from 0 on, with a ``b`` for each role, in the order of
    rollouts, whenever they ended (role-conditioned advantage estimation: Liu et al. 2025, arXiv 2506.24119). A response
    alone in its group is trained too, and ``advantage`` has no effect.

    Attributes:
        decay: of the mean, in [0, 1].
        baselines: the mean of each role so far, without a role ``""``; a checkpoint holds them.
    """

    decay: Fraction = field(default=0.95, kw_only=True)
    baselines: dict[str, float] = field(default_factory=dict, init=False)

    def unfit(self, batch: Batch) -> Sequence[Drop]:
        return AdaptiveObjective.unfit(self, batch)

    def estimated(self, batch: Batch) -> Batch:
        found = super().estimated(batch)
        means = {f"objective/baseline/{role}": mean for role, mean in sorted(self.baselines.items()) if role}
        return replace(found, metrics={**found.metrics, **means})

    def _relative(
        self, batch: Batch, earned: Mapping[int, FloatArray], groups: Sequence[NDArray[np.int64]]
    ) -> Mapping[int, FloatArray]:
        del groups
        relative, prompts = dict[int, FloatArray](), [response.prompt for response in batch.responses]
        for row in sorted(earned, key=lambda row: prompts[row].first):
            role, total = prompts[row].role, float(earned[row].sum(dtype=np.float64))
            baseline = self.baselines.get(role, 0.0)
            relative[row] = np.full(len(earned[row]), total - baseline, np.float32)
            self.baselines[role] = self.decay * baseline + (1.0 - self.decay) * total
        return relative

    def state_dict(self) -> Mapping[str, Any]:
        return {**super().state_dict(), "baselines": dict(self.baselines)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.baselines = dict(state["baselines"])


@dataclass(eq=False)
@validated(ConfigError)
class Distillation(AdaptiveObjective):
    """Joins the results of the scorers; a teacher alone makes the advantages, and the scores are measured.

    The advantage of a token is ``-distill * (log pi - log T)``, as it is: it has a sign and a unit of its own, so
    nothing is whitened. It has the named inputs of :class:`BatchStage`, of which it needs ``teacher=``.

    Attributes:
        distill: the weight of the teacher; see :class:`AdaptiveObjective`. With 0 the loss alone learns from it.
        mask_truncated: leave responses that ended at the length cap out of the loss.

    Raises:
        ConfigError: the weight is negative.
    """

    distill: NonNegative = 1.0
    mask_truncated: bool = False
    kl_estimator: KLEstimator = field(default="k1", init=False, repr=False)
    shaping: ScoreShaping = field(default_factory=ScoreShaping, init=False, repr=False)
    control: KLControl = field(default=FixedKL(0.0), init=False, repr=False)

    def estimated(self, batch: Batch) -> Batch:
        """Return the batch with advantages of 0, to which the teacher's are added, and the metrics of the scores."""
        advantages = np.zeros(len(batch.tokens), np.float32)
        return replace(batch, advantages=advantages, metrics=self.objective(batch).metrics(batch))
