"""What the sections of the settings are made of, and the largest of them: ``[step]``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, model_validator

from oppo.estimators import KLEstimator
from oppo.staleness import Correction, Denominator

MOST = 2**31
"""Counts stay below: they are numbers of steps, rollouts, tokens and bytes, and many become an int32."""

Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Seconds: TypeAlias = Annotated[float, Field(ge=0, lt=MOST, allow_inf_nan=False)]
Count: TypeAlias = Annotated[int, Field(ge=0, lt=MOST)]
PositiveCount: TypeAlias = Annotated[int, Field(gt=0, lt=MOST)]
KLPlace: TypeAlias = Literal["reward", "loss"]
AdmissionName: TypeAlias = Literal["overcommit", "adaptive", "slope", "slope-algorithm1", "tail-batched"]


V = TypeVar("V")


@dataclass(frozen=True)
class ByAlgorithm(Generic[V]):
    """The default of a key of ``[step]`` that some algorithms have another one of."""

    usual: V
    own: Mapping[str, V]

    def __call__(self, section: dict[str, Any]) -> V:
        """Return the default beside the keys that come before this one."""
        return self.own.get(section.get("algorithm", ""), self.usual)


class Section(BaseModel):
    """A table of the file: frozen, no coercion, no unknown key."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StepSection(Section):
    """``[step]``: the algorithm, the schedule of a step and the shape of its reward (see :mod:`oppo.recipes`)."""

    algorithm: Literal["ppo", "grpo", "rloo"] = Field(
        default="ppo",
        description="how advantages are estimated: `ppo` with a critic, by GAE; `grpo` and `rloo` without one, by "
        "comparing the responses to each prompt with one another",
    )
    samples: Annotated[int, Field(ge=2, lt=MOST)] | None = Field(
        default=None,
        description="responses to each prompt, where they are compared; `batch` and `extra` count prompts then; when "
        "absent 8, or one for `ppo`",
    )
    batch: PositiveCount = Field(default=32, description="rollouts trained in a step")
    extra: Count | None = Field(
        default=None,
        description="rollouts kept in flight beyond the batch, or the most of them where `admission` adapts their "
        "number; when absent 0 (no rollout is ever carried over), or a quarter of the batch",
    )
    max_deferrals: PositiveCount = Field(default=2, description="a rollout carried over this often is waited for")
    admission: AdmissionName = Field(
        default="overcommit",
        description="how many are kept in flight: `overcommit` always `extra`; `adaptive` as many as save time at the "
        "price of their lag; `slope` and `slope-algorithm1` more while the score rises (the paper's two rules); "
        "`tail-batched` a quarter of the batch, and those that are late begin anew together in a later step, so that "
        "nothing is ever stale",
    )
    lag_price: NonNegative = Field(
        default=1.0, description="what a mean lag of one step costs `adaptive`, in parts of a step's time"
    )
    chunk: PositiveCount | Literal["whole", "tuned"] = Field(
        default=32,
        description="tokens streamed to the scorers at a time; `whole`: each response when it has ended; `tuned`: a "
        "part of `max_new_tokens` that is tried out every 50 steps",
    )
    kl: NonNegative = Field(default=0.05, description="coefficient of the KL penalty (its first value when adaptive)")
    kl_in: KLPlace = Field(
        default_factory=ByAlgorithm[KLPlace]("reward", {"grpo": "loss"}),
        description="whether the KL penalty is part of the reward, or of the loss; not of a reward that is "
        "standardised, as `grpo` does",
    )
    kl_estimator: KLEstimator = Field(
        default_factory=ByAlgorithm[KLEstimator]("k1", {"grpo": "k3"}),
        description="estimator of the KL penalty; k2 or k3 in the loss",
    )
    kl_target: Positive | None = Field(default=None, description="adapt the coefficient to hold this KL per rollout")
    kl_horizon: PositiveCount | None = Field(default=None, description="rollouts over which the coefficient adapts")
    score_norm: bool = Field(default=False, description="normalise scores by the mean and spread of all so far")
    score_clip: Positive | None = Field(default=None, description="bound scores to this on either side of 0")
    reward_scale: Positive = Field(default=1.0, description="multiplies the scores")
    missing_eos_penalty: NonNegative = Field(
        default=0.0, description="taken from the reward of a response that ended at max_new_tokens"
    )
    denominator: Denominator = Field(
        default="behaviour",
        description="what the probability ratio of a stale token is over: the policy that sampled it, or the one "
        "before the update",
    )
    weight: Literal["none", "truncated", "mask", "mask_sequence"] = Field(
        default="none",
        description="what stale tokens weigh: importance weights, truncated at `weight_cap`, or masked outside of "
        "`weight_low` .. `weight_high`, by token or by rollout (geometric mean)",
    )
    weight_cap: Annotated[float, Field(ge=1, allow_inf_nan=False)] = Field(
        default=2.0, description="an importance weight is at most this"
    )
    weight_low: Fraction | None = Field(
        default=None, description="what weighs less is masked; 0.5 for a token, 0.9 for a rollout, when absent"
    )
    weight_high: Annotated[float, Field(ge=1, allow_inf_nan=False)] | None = Field(
        default=None, description="what weighs more is masked; 5 for a token, 1.1 for a rollout, when absent"
    )
    on_publish: Literal["recompute", "keep"] = Field(
        default="recompute",
        description="what a carried rollout goes on with after an update: keys and values computed again by the new "
        "weights, or those it has (cheaper, but of several versions, and lost when a run is resumed)",
    )
    whiten_rewards: bool = Field(default=False, description="scale a batch's rewards to unit variance")
    gamma: Fraction = Field(default=1.0, description="discount")
    lam: Fraction = Field(default=0.95, description="lambda of generalised advantage estimation")

    @model_validator(mode="after")
    def _consistent(self) -> StepSection:
        if self.algorithm == "ppo" and self.samples is not None:
            raise ValueError("algorithm = 'ppo' makes one response to each prompt: leave samples out, or choose 'grpo'")
        if self.extra is not None and self.admission == "tail-batched":
            raise ValueError("admission = 'tail-batched' launches a quarter of the batch more: leave extra out")
        if self.extra is not None and self.extra > self.batch:
            raise ValueError(
                f"extra must be at most batch ({self.batch}), so that overdue rollouts fit; got {self.extra}"
            )
        if (self.kl_target is None) != (self.kl_horizon is None):
            raise ValueError("kl_target and kl_horizon go together: give both (adaptive KL) or neither (constant)")
        if self.kl_target is not None and not self.kl:
            raise ValueError("kl_target adapts the penalty by multiplying it: give step.kl, where it begins, above 0")
        if self.algorithm == "grpo" and self.kl_in == "reward" and self.kl > 0:
            raise ValueError(
                "algorithm = 'grpo' standardises rewards, so that where the scores of a group tie a KL in them is of "
                "full size at any coefficient: put it into the loss with step.kl_in = 'loss', or choose 'rloo'"
            )
        if self.kl_in == "loss" and self.kl_target is not None:
            raise ValueError("kl_target adapts the penalty in the reward: leave it out where kl_in = 'loss'")
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ValueError(
                "the gradient of k1 is zero in expectation, so kl_in = 'loss' needs kl_estimator = 'k2' or 'k3'"
            )
        return self

    @property
    def group(self) -> int:
        """Responses to each prompt."""
        return self.samples or (1 if self.algorithm == "ppo" else 8)

    def correction(self) -> Correction:
        """Return how the tokens of older weights are learnt from."""
        return Correction(
            denominator=self.denominator,
            weight="mask" if self.weight == "mask_sequence" else self.weight,
            level="sequence" if self.weight == "mask_sequence" else "token",
            cap=self.weight_cap,
            low=self.weight_low,
            high=self.weight_high,
        )
