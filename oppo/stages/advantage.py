"""GAE: scored rollouts in, one training batch out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from numbers import Real
from typing import Any, SupportsFloat, TypeAlias, get_args

import numpy as np

from oppo.errors import ConfigError
from oppo.estimators import AdaptiveKL, FixedKL, KLEstimator, gae, kl_estimate, shaped_rewards, whiten
from oppo.events import Batch, Defer, Drop, Finish, FloatArray, RolloutEvent, Scored
from oppo.graph import Receiver, Sender, join, where
from oppo.shaping import RunningMoments, ScoreShaping
from oppo.stages.contract import require_per_token, require_score

KLControl: TypeAlias = FixedKL | AdaptiveKL

LARGEST = float(np.finfo(np.float32).max)
NONFINITE = "nonfinite"
"""How the reason of a drop begins whose cause is a number that is not finite."""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """One finished rollout with everything that was said of it; per-token arrays have the response's length.

    Attributes:
        proximal: log-probs under the weights that are about to be updated; ``None``: nobody computed them, and those of
            the policy that sampled the tokens stand for them.
    """

    finish: Finish
    reference: FloatArray
    score: float
    values: FloatArray
    proximal: FloatArray | None = None

    @property
    def logprobs(self) -> FloatArray:
        """The proximal log-probs, or what stands for them: float32 [n]."""
        return self.finish.response.logprobs if self.proximal is None else self.proximal

    def require_fit(self) -> None:
        """Raise unless the score is one number, and everything else one for each response token.

        Raises:
            ProtocolError: a scorer said something else of it.
        """
        require_score(self.score, self.finish)
        require_per_token(self.reference, self.finish, "reference log-prob")
        require_per_token(self.values, self.finish, "value")
        require_per_token(self.logprobs, self.finish, "proximal log-prob")

    def fault(self) -> str | None:
        """Return why the rollout cannot be trained: the first thing said of it that is no finite float32."""
        said: Mapping[str, float | FloatArray] = {
            "score": self.score,
            "reference log-prob": self.reference,
            "value": self.values,
            "behaviour log-prob": self.finish.response.logprobs,
            "proximal log-prob": self.logprobs,
        }
        return next(
            (f"{NONFINITE} {name}" for name, value in said.items() if not (np.abs(value) <= LARGEST).all()), None
        )


@dataclass(slots=True, eq=False)
class Gathered:
    """What a step's rollouts came to, in the order in which that was known."""

    rows: list[Row] = field(default_factory=list)
    dropped: list[Drop] = field(default_factory=list)
    deferred: list[Defer] = field(default_factory=list)

    def put_aside(self, event: Finish | Drop | Defer) -> None:
        """Take note of a rollout that is carried into the next step."""
        if isinstance(event, Defer):
            self.deferred.append(event)

    def take(
        self,
        finish: Finish | Drop | Defer,
        reference: Scored[FloatArray] | Drop,
        score: Scored[float] | Drop,
        values: Scored[FloatArray] | Drop,
        proximal: Scored[FloatArray] | Drop | None = None,
    ) -> None:
        """Take what was said of one rollout: a row, or a drop where somebody dropped it or said no finite number."""
        said = (finish, reference, score, values, proximal)
        lost = next((one for one in said if isinstance(one, Drop)), None)
        if lost is not None:
            self.dropped.append(lost)
        elif (
            isinstance(finish, Finish)
            and isinstance(reference, Scored)
            and isinstance(score, Scored)
            and isinstance(values, Scored)
            and not isinstance(proximal, Drop)
        ):
            row = Row(finish, reference.value, score.value, values.value, proximal.value if proximal else None)
            row.require_fit()
            fault = row.fault()
            if fault is None:
                self.rows.append(row)
            else:
                self.dropped.append(Drop(finish.rollout, fault))


@dataclass(eq=False)
class GAE:
    """Joins what the scorers said of each finished rollout and estimates advantages (Schulman et al. 2016).

    The reward of a token is ``-kl * (estimate of its KL to the reference)``, plus the shaped score on the last sampled
    token; the KL is that of the proximal policy, where its log-probs are known. A rollout of which something said is
    not finite is dropped alone: nothing of it reaches the others.

    Attributes:
        gamma: discount.
        lam: bias-variance trade of the estimator.
        kl: coefficient of the KL penalty: a number, or a controller that adapts it to a target.
        kl_estimator: ``k1``, ``k2`` or ``k3`` (Schulman, "Approximating KL divergence", 2020).
        shaping: what is made of the scores first; replaced by its successor after each batch.
        whiten_rewards: scale the rewards of a batch to unit variance, their mean kept.
        whiten_advantages: scale the advantages of a batch to zero mean and unit variance.

    Raises:
        ConfigError: a value is out of range, or there is no such estimator.
        ValueError: the coefficient of the KL penalty is negative or not finite.
    """

    gamma: float = 1.0
    lam: float = 0.95
    kl: SupportsFloat | KLControl = 0.05
    kl_estimator: KLEstimator = "k1"
    shaping: ScoreShaping = field(default_factory=ScoreShaping)
    whiten_rewards: bool = False
    whiten_advantages: bool = True
    _control: KLControl = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("gamma", "lam"):
            value = getattr(self, name)
            if not (isinstance(value, Real) and 0 <= float(value) <= 1):
                raise ConfigError(f"{name} must be a number from 0 to 1, not {value!r}")
        if self.kl_estimator not in get_args(KLEstimator):
            raise ConfigError(
                f"kl_estimator must be one of {', '.join(get_args(KLEstimator))}, not {self.kl_estimator!r}"
            )
        if not isinstance(self.kl, SupportsFloat | FixedKL | AdaptiveKL):
            raise ConfigError(f"kl must be a number, or a controller such as oppo.AdaptiveKL, not {self.kl!r}")
        self._control = self.kl if isinstance(self.kl, FixedKL | AdaptiveKL) else FixedKL(float(self.kl))

    def state_dict(self) -> Mapping[str, Any]:
        """Return what was learned of KL and scores so far."""
        return {"kl": self._control.coefficient, "moments": asdict(self.shaping.moments)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what another estimator had learned."""
        if isinstance(self._control, AdaptiveKL):
            self._control = replace(self._control, initial=float(state["kl"]))
        self.shaping = replace(self.shaping, moments=RunningMoments(**state["moments"]))

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        reference: Receiver[Scored[FloatArray] | Drop],
        score: Receiver[Scored[float] | Drop],
        value: Receiver[Scored[FloatArray] | Drop],
        /,
        *,
        out: Sender[Batch],
    ) -> None:
        """Send the step's batch as soon as every finished rollout is scored; nothing when there was no rollout."""
        gathered = Gathered()
        ends = where(rollout, Finish, Drop, Defer)
        async for lanes in join(ends, reference, score, value, key=finished_rollout, aside=gathered.put_aside):
            gathered.take(*lanes)
        await self.send(gathered, out)

    async def send(self, gathered: Gathered, out: Sender[Batch]) -> None:
        """Send the batch of what was gathered, in admission order; nothing when there was no rollout."""
        if gathered.rows or gathered.dropped or gathered.deferred:
            gathered.rows.sort(key=lambda row: row.finish.rollout)
            gathered.dropped.sort(key=lambda drop: drop.rollout)  # they came in the order of the scores: one of time
            await out.send(self.batch(gathered.rows, gathered.dropped, gathered.deferred))

    def batch(self, rows: Sequence[Row], dropped: Sequence[Drop] = (), deferred: Sequence[Defer] = ()) -> Batch:
        """Return the training batch of these rows, in the order given, and let the KL controller learn from it."""
        responses = [row.finish.response for row in rows]
        lengths = [len(response) for response in responses]
        offsets = np.concatenate((np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)))
        logprobs = flat([response.logprobs for response in responses])
        proximal = flat([row.logprobs for row in rows])
        sampled = np.concatenate([response.sampled for response in responses] or [np.zeros(0, np.bool_)])
        reference = flat([row.reference for row in rows])
        values = flat([row.values for row in rows])
        kl = np.where(sampled, kl_estimate(proximal, reference, self.kl_estimator), np.float32(0))
        slices = [slice(int(a), int(b)) for a, b in pairwise(offsets)]
        scores = np.array([row.score for row in rows], np.float32)
        self.shaping = self.shaping.after(scores)
        shaped = self.shaping.shaped(scores, np.array([row.finish.reason != "length" for row in rows], np.bool_))
        rewards = flat(
            [
                shaped_rewards(float(score), kl[s], self._control.coefficient, sampled[s])
                for score, s in zip(shaped, slices, strict=True)
            ]
        )
        if self.whiten_rewards:
            rewards = whiten(rewards, sampled, shift_mean=False)
        estimates = [gae(rewards[s], values[s], self.gamma, self.lam) for s in slices]
        advantages = flat([advantage for advantage, _ in estimates])
        returns = flat([total for _, total in estimates])
        if self.whiten_advantages:
            advantages = whiten(advantages, sampled)
        metrics = self._metrics(
            scores, shaped, [float(kl[s].sum()) for s in slices], [float(-logprobs[s].sum()) for s in slices]
        )
        return Batch(
            responses=tuple(responses),
            reasons=tuple(row.finish.reason for row in rows),
            scores=scores,
            offsets=offsets,
            tokens=np.concatenate([r.tokens for r in responses] or [np.zeros(0, np.int32)]),
            versions=np.concatenate([r.versions for r in responses] or [np.zeros(0, np.int32)]),
            sampled=sampled,
            logprobs=logprobs,
            proximal=proximal,
            reference=reference,
            values=values,
            rewards=rewards,
            advantages=advantages,
            returns=returns,
            metrics=metrics,
            dropped=tuple(dropped),
            deferred=tuple(deferred),
        )

    def _metrics(
        self, scores: FloatArray, shaped: FloatArray, kl: Sequence[float], surprisal: Sequence[float]
    ) -> dict[str, float]:
        if not len(scores):
            return {}
        coefficient = self._control.coefficient
        mean_kl, mean_score = float(np.mean(kl)), float(np.mean(scores))
        self._control = self._control.after(mean_kl, len(scores))
        return {
            "objective/kl": mean_kl,
            "objective/kl_coef": coefficient,
            "objective/entropy": float(np.mean(surprisal)),
            "objective/non_score_reward": -coefficient * mean_kl,
            "objective/rlhf_reward": float(np.mean(shaped)) - coefficient * mean_kl,
            "objective/scores": mean_score,
            "objective/scores_std": float(np.std(scores)),
            "objective/shaped_scores": float(np.mean(shaped)),
        }


@dataclass(eq=False)
class ProximalGAE:
    """The same with a fifth input: log-probs of stale tokens under the weights that are about to be updated.

    Attributes:
        estimator: makes the batch; only this stage may use it.
    """

    estimator: GAE

    def state_dict(self) -> Mapping[str, Any]:
        """Return what was learned of KL and scores so far."""
        return self.estimator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with what another estimator had learned."""
        self.estimator.load_state_dict(state)

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        reference: Receiver[Scored[FloatArray] | Drop],
        score: Receiver[Scored[float] | Drop],
        value: Receiver[Scored[FloatArray] | Drop],
        proximal: Receiver[Scored[FloatArray] | Drop],
        /,
        *,
        out: Sender[Batch],
    ) -> None:
        """Send the step's batch as soon as every finished rollout is scored; nothing when there was no rollout."""
        gathered = Gathered()
        ends = where(rollout, Finish, Drop, Defer)
        lanes = join(ends, reference, score, value, proximal, key=finished_rollout, aside=gathered.put_aside)
        async for said in lanes:
            gathered.take(*said)
        await self.estimator.send(gathered, out)


def finished_rollout(item: object) -> int | None:
    """Return the rollout that an item ends or describes; ``None`` for anything that has no counterpart to wait for."""
    return item.rollout if isinstance(item, Finish | Drop | Scored) else None


def flat(arrays: Sequence[FloatArray]) -> FloatArray:
    """Return per-row float arrays end to end, as float32."""
    return np.concatenate([np.asarray(array, np.float32) for array in arrays] or [np.zeros(0, np.float32)])
