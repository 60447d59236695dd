"""The protocol of an algorithm of ``oppo train``, its models, and the settings that clipped losses share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal, Protocol, TypeAlias

from oppo.admission import Admission
from oppo.admission.chunking import ChunkSize, Fixed
from oppo.declared import (
    AtLeastOne,
    Fraction,
    FromList,
    NonNegative,
    Positive,
    PositiveCount,
    changed,
    setting,
    validated,
)
from oppo.errors import ConfigError
from oppo.events import Drop, FloatArray, StepReport
from oppo.graph import Graph
from oppo.models import Policy, Scorer, Trainer
from oppo.returns import CAP, AdaptiveKL, ImportanceCorrection, KLEstimator, Level, RatioBase, ScoreShaping, TokenWeight
from oppo.scorers import Lesson
from oppo.stages.hold import Siblings
from oppo.training import Aggregation, Surrogate, SurrogateKind
from oppo.turns import Environment

if TYPE_CHECKING:
    from oppo.losses import ClippedLoss, Loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Roles:
    """The models of a run and the schedule of its steps, from which an algorithm makes a graph.

    The fields are the arguments of :func:`oppo.ppo`. ``critic`` is ``None`` for an algorithm without one, ``proximal``
    for one that corrects nothing, and ``reference`` for one that refers to none, unless settings name a model for it,
    to measure the KL. ``teacher`` is the model of ``models.teacher`` or ``[teacher]``, and ``siblings`` chooses what it
    is shown, if that is a response. ``max_new_tokens`` is the cap of a response, 0 if not known. An ``environment``
    also joins a graph that was made without it.
    """

    policy: Policy
    reward: Scorer[float | Drop]
    trainer: Trainer
    admission: Admission
    reference: Scorer[FloatArray] | None = None
    critic: Scorer[FloatArray] | None = None
    proximal: Scorer[FloatArray] | None = None
    chunks: ChunkSize = field(default_factory=Fixed)
    max_new_tokens: int = 0
    teacher: Scorer[Lesson | Drop] | None = None
    siblings: Siblings | None = None
    environment: Environment | None = None


class Algorithm(Protocol):
    """The settings of an algorithm, a frozen dataclass, and the loss and graph that they define."""

    has_critic: ClassVar[bool]
    """Whether a critic is trained too and estimates values."""

    @property
    def responses(self) -> int:
        """Responses to each prompt; several are compared with one another."""

    @property
    def refers(self) -> bool:
        """Whether log-probs of a reference are needed, for a KL penalty or by the loss; otherwise none is loaded."""

    @property
    def corrects(self) -> bool:
        """Whether stale tokens are corrected for, which needs log-probs under the proximal policy."""

    def graph(self, roles: Roles) -> Graph[StepReport]:
        """Return the graph of a step."""

    def loss(self) -> Loss:
        """Return the trainer's loss; this loads torch."""


OF_THE_LOSS: Final = frozenset(
    {
        *("surrogate", "dual_clip", "gates", "clip", "clip_high", "value_clip"),
        *("entropy_coefficient", "value_coefficient", "aggregation", "beta", "nll", "nll_above", "distill_beta"),
    }
)
"""The settings that an algorithm's loss alone reads."""

Correction: TypeAlias = Literal["none", "truncated", "truncated_sequence", "mask", "mask_sequence", "mask_product"]

KINDS: Final[Mapping[str, tuple[TokenWeight, Level]]] = {
    "none": ("none", "token"),
    "truncated": ("truncated", "token"),
    "truncated_sequence": ("truncated", "product"),
    "mask": ("mask", "token"),
    "mask_sequence": ("mask", "sequence"),
    "mask_product": ("mask", "product"),
}
"""The weight and the level of a correction by the value of ``is_correction``."""

KLPlace: TypeAlias = Literal["reward", "loss"]


@dataclass(frozen=True, kw_only=True)
@validated(ConfigError)
class Clipped:
    """The settings of a policy loss that is PPO's, and of a teacher's part in the advantages.

    Raises:
        ConfigError: a value is out of range, or two contradict each other.
    """

    has_critic: ClassVar[bool] = False

    distill: NonNegative = setting(
        0.0,
        "weight of `models.teacher`: the log-ratio of the teacher to the policy, times this, is added to the advantage "
        "of each token, after all else; or, with `distill_top_k`, the divergence from the teacher is added to the loss",
    )
    distill_top_k: PositiveCount | None = setting(
        None,
        "learn the distribution over the teacher's likeliest ids, so many at each token, and all others together, in "
        "the loss; absent: the sampled token's log-ratio alone, in the advantage",
    )
    distill_beta: Fraction = setting(
        1.0, "divergence with `distill_top_k`: 0, forward KL; 1, reverse KL; between, generalised Jensen-Shannon"
    )
    mask_truncated: bool = setting(
        default=False,
        description="leave responses that ended at max_new_tokens out of the loss; they stay in the baseline",
    )
    surrogate: SurrogateKind = setting(
        "clip",
        "loss of a token by its ratio and advantage: PPO's `clip`; `dual_clip`, bounded for negative advantages too; "
        "`cispo`, whose clipped tokens keep their gradient; `sapo`, a smooth gate; `dppo_tv`, a mask by probabilities",
    )
    dual_clip: float | None = setting(None, "the largest ratio that counts against a token (`dual_clip`); absent: 3")
    gates: Annotated[tuple[Positive, Positive], FromList()] | None = setting(
        None, "steepness of the gate (`sapo`) for positive and negative advantages; absent: 1 and 1.05"
    )
    clip: Positive = setting(0.2, "how far the probability ratio may move from 1, or fall below it")
    clip_high: Positive | None = setting(None, "how far the ratio may rise above 1; absent: as `clip`")
    entropy_coefficient: NonNegative = setting(0.0, "weight of the entropy bonus")
    aggregation: Aggregation = setting(
        "tokens",
        "mean of the loss: over all `tokens` of a minibatch; over `responses`, each the mean of its tokens; "
        "`response_sums`, each their sum; or `constant`, their sum divided by `sampling.max_new_tokens`",
    )
    ratio_base: RatioBase = setting(
        "behaviour",
        "denominator of a stale token's probability ratio: the policy that sampled it, or the one before the update",
    )
    is_correction: Correction = setting(
        "none",
        "importance sampling (IS) of stale tokens: weights truncated at `is_cap`, by token or by rollout (product), or "
        "masked outside `is_low` .. `is_high`, by token or by rollout (geometric mean, or product); absent: "
        "`truncated` if another engine than the trainer's decodes (`models.engine`)",
    )
    is_cap: AtLeastOne = setting(CAP, "an importance weight is at most this")
    is_low: Fraction | None = setting(None, "smaller weights are masked; absent: 0.5, 0.9 by mean, 0 by product")
    is_high: AtLeastOne | None = setting(None, "larger weights are masked; absent: 5, 1.1 by mean, 3 by product")
    is_k3: Positive | None = setting(
        None,
        "leave rollouts out of the policy loss whose mismatch, the mean of `m - 1 - log m` over tokens, is larger; "
        "absent: none",
    )

    def __post_init__(self) -> None:
        Surrogate.of(self)
        if self.distill_top_k is None and changed(self, {"distill_beta"}):
            raise ConfigError(
                f"distill_beta = {self.distill_beta} is of the divergence over a teacher's likeliest ids: give "
                "distill_top_k, or leave distill_beta out"
            )
        if self.distill_top_k is not None and not self.distill:
            raise ConfigError(
                f"distill_top_k = {self.distill_top_k} is of a teacher, whose weight, distill, is 0: give distill, or "
                "leave distill_top_k out"
            )
        kind = self.is_correction.partition("_")[0]
        reads = {"truncated": {"is_cap"}, "mask": {"is_low", "is_high"}}.get(kind, set())
        if idle := changed(self, {"is_cap", "is_low", "is_high"} - reads):
            raise ConfigError(
                f"is_correction = {self.is_correction!r} does not read {' and '.join(sorted(idle))}: leave that "
                "out, or choose a kind that does: 'truncated' for is_cap, 'mask' for is_low and is_high"
            )

    @property
    def refers(self) -> bool:
        return False

    @property
    def distills(self) -> bool:
        return self.distill > 0

    @property
    def distill_advantage(self) -> float:
        """The weight of a teacher in the advantage: 0 if the loss learns its distribution."""
        return self.distill if self.distill_top_k is None else 0.0

    @property
    def corrects(self) -> bool:
        return self.correction.needs_proximal

    @property
    def correction(self) -> ImportanceCorrection:
        weight, level = KINDS[self.is_correction]
        return ImportanceCorrection(
            ratio_base=self.ratio_base,
            weight=weight,
            level=level,
            cap=self.is_cap,
            low=self.is_low,
            high=self.is_high,
            k3=self.is_k3,
        )

    def loss(self) -> ClippedLoss:
        from oppo.losses import ClippedLoss  # noqa: PLC0415 - torch takes seconds to import

        return ClippedLoss(
            surrogate=self.surrogate,
            clip=self.clip,
            clip_high=Surrogate.of(self).clip_high,  # sapo reads none, and DAPO has one by default
            dual_clip=self.dual_clip,
            gates=self.gates,
            entropy_coefficient=self.entropy_coefficient,
            aggregation=self.aggregation,
            correction=self.correction,
            distill=self.distill - self.distill_advantage,
            distill_beta=self.distill_beta,
        )


@dataclass(frozen=True, kw_only=True)
class ClippedAlgorithm(Clipped):
    """The settings of an algorithm that learns from scores, with a policy loss that is PPO's."""

    kl: NonNegative = setting(0.05, "coefficient of the KL penalty (its first value when adaptive)")
    kl_in: KLPlace = setting(
        "reward",
        "place of the KL penalty: the reward or the loss; always the loss if rewards are standardised, as by `grpo`",
    )
    kl_estimator: KLEstimator = setting("k1", "estimator of the KL penalty; k2 or k3 in the loss")
    kl_target: Positive | None = setting(None, "adapt the coefficient to hold this KL per rollout")
    kl_horizon: PositiveCount | None = setting(None, "rollouts over which the coefficient adapts")
    score_norm: bool = setting(default=False, description="normalise scores by the running mean and standard deviation")
    score_clip: Positive | None = setting(None, "bound scores to this on either side of 0")
    reward_scale: Positive = setting(1.0, "multiplies the scores")
    missing_eos_penalty: NonNegative = setting(
        0.0, "subtracted from the reward of a response that ended at max_new_tokens"
    )

    nll: NonNegative = setting(
        0.0, "weight of the negative log-likelihood of responses whose score is above `nll_above` (0.1 in VAPO)"
    )
    nll_above: float = setting(0.0, "responses with higher scores are the ones that `nll` makes likelier")

    def __post_init__(self) -> None:
        super().__post_init__()
        if changed(self, {"nll_above"}) and not self.nll:
            raise ConfigError(
                f"nll_above = {self.nll_above} says which responses nll makes likelier, and nll is 0: give nll, or "
                "leave nll_above out"
            )
        if (self.kl_target is None) != (self.kl_horizon is None):
            raise ConfigError("kl_target and kl_horizon go together: give both (adaptive KL) or neither (constant)")
        if self.kl_target is not None and not self.kl:
            raise ConfigError("kl_target adapts the penalty by multiplying it: give kl, where it begins, above 0")
        if self.kl_in == "loss" and self.kl_target is not None:
            raise ConfigError("kl_target adapts the penalty in the reward: leave it out where kl_in = 'loss'")
        if self.kl_in == "loss" and self.kl_estimator == "k1":
            raise ConfigError(
                "the gradient of k1 is zero in expectation, so kl_in = 'loss' needs kl_estimator = 'k2' or 'k3'"
            )

    @property
    def refers(self) -> bool:
        return self.kl > 0

    @property
    def shaping(self) -> ScoreShaping:
        return ScoreShaping(
            norm=self.score_norm,
            clip=math.inf if self.score_clip is None else self.score_clip,
            scale=self.reward_scale,
            missing_eos_penalty=self.missing_eos_penalty,
        )

    @property
    def reward_kl(self) -> float | AdaptiveKL:
        """The coefficient of the KL penalty in the reward: 0 if the penalty is in the loss."""
        if self.kl_target is not None and self.kl_horizon is not None:
            return AdaptiveKL(self.kl, self.kl_target, self.kl_horizon)
        return self.kl if self.kl_in == "reward" else 0.0

    def loss(self) -> ClippedLoss:
        loss = replace(super().loss(), nll=self.nll, nll_above=self.nll_above)
        return replace(loss, kl=self.kl, kl_estimator=self.kl_estimator) if self.kl_in == "loss" else loss
