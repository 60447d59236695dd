"""Algorithms that compare the responses to a prompt with one another: GRPO and its variants, RLOO, online DPO."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from annotated_types import Ge, Lt

from oppo.admission import Admission
from oppo.admission.chunking import ChunkSize, Fixed
from oppo.algorithms.base import ClippedAlgorithm, KLPlace, Roles
from oppo.algorithms.ppo import streamed
from oppo.declared import (
    MOST,
    Count,
    Fraction,
    NonNegative,
    Positive,
    PositiveCount,
    changed,
    require_whole,
    setting,
    validated,
)
from oppo.errors import ConfigError, in_toml
from oppo.events import Drop, FloatArray, StepReport
from oppo.graph import Graph
from oppo.models import Policy, Scorer, Trainer
from oppo.returns import Credit, GroupAdvantage, ImportanceCorrection, KLEstimator, ScoreShaping
from oppo.scorers import Lesson
from oppo.stages import DynamicSampling, GroupRelative, RoleBaseline, Siblings
from oppo.training import Aggregation
from oppo.turns import Environment

if TYPE_CHECKING:
    from oppo.losses import Loss, SequenceLoss


def grpo(
    *,
    policy: Policy,
    reward: Scorer[float | Drop],
    trainer: Trainer,
    admission: Admission,
    samples: int = 8,
    advantage: GroupRelative | None = None,
    reference: Scorer[FloatArray] | None = None,
    proximal: Scorer[FloatArray] | None = None,
    select: DynamicSampling | None = None,
    chunks: ChunkSize | None = None,
    environment: Environment | None = None,
    teacher: Scorer[Lesson | Drop] | None = None,
    siblings: Siblings | None = None,
) -> Graph[StepReport]:
    """Return training without a critic, streamed: the responses to one prompt are compared with one another.

    GRPO (Shao et al. 2024) by default; RLOO (Ahmadian et al. 2024) with
    ``advantage=GroupRelative("leave_one_out", kl=0.05)``; Dr. GRPO (Liu et al. 2025) with
    ``advantage=GroupRelative("centred")``. GRPO's KL is in its trainer's loss,
    ``ClippedLoss(kl=0.04, kl_estimator="k3", aggregation="responses")``, and RLOO's and Dr. GRPO's loss is
    ``ClippedLoss(aggregation="constant")``.

    Other arguments are as for :func:`oppo.ppo`.

    Args:
        trainer: trains the actor.
        admission: groups in a batch, overcommit and the cut; it counts whole groups.
        samples: responses to each prompt, a group.
        advantage: the stage that compares them, with the KL penalty in the reward and the shaping of scores;
            ``GroupRelative()`` by default.
        reference: needed for a KL penalty, here or in the loss.
        select: which groups are trained; a step replaces the others, in rounds (dynamic sampling). All of them by
            default.
        teacher: log-probs of a teacher, float32 [n], which ``GroupRelative(distill=...)`` adds to the advantages; see
            :func:`oppo.distill`.
        siblings: for a teacher that is shown a response that passed (:class:`oppo.scorers.BehindPrompt`).

    Raises:
        ConfigError: there are fewer than two samples, or a KL penalty has no reference.
    """
    require_whole("samples", samples, error=ConfigError)
    if samples < 2:
        raise ConfigError(f"samples must be 2 or more, not {samples}: a response alone has nothing to be compared with")
    estimator = advantage or GroupRelative()
    if reference is None and estimator.refers:
        raise ConfigError(f"the KL penalty, kl = {estimator.kl}, needs a reference: give one, or leave kl at 0")
    roles = Roles(
        policy=policy,
        reward=reward,
        trainer=trainer,
        admission=admission,
        reference=reference,
        proximal=proximal,
        chunks=chunks or Fixed(),
        environment=environment,
        teacher=teacher,
        siblings=siblings,
    )
    return streamed("grpo", roles, estimator, samples, select)


@dataclass(frozen=True, kw_only=True)
class GroupAlgorithm(ClippedAlgorithm):
    """The settings of an algorithm without a critic, which compares the responses to a prompt with one another."""

    samples: Annotated[int, Ge(2), Lt(MOST)] = setting(
        8, "responses to each prompt, which are compared; `step.batch` and `step.overcommit` count prompts"
    )
    credit: Credit = setting(
        "response",
        "what is compared in a group: the `response`; its `turns`, each by the rewards from it on; or the response and "
        "by those rewards all turns that were taken in the same `state` of the environment (GiGPO)",
    )
    gamma: Fraction = setting(1.0, "discount of the rewards of later turns (`credit`)")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.advantage(self.shaping)  # which refuses settings that contradict each other

    def advantage(self, shaping: ScoreShaping) -> GroupRelative:
        return GroupRelative(
            self.compared,
            self.reward_kl,
            self.kl_estimator,
            shaping,
            self.mask_truncated,
            self.distill_advantage,
            credit=self.credit,
            gamma=self.gamma,
        )

    @property
    def compared(self) -> GroupAdvantage | Literal["each_reward"]:
        return "leave_one_out"

    @property
    def responses(self) -> int:
        return self.samples

    def selection(self) -> DynamicSampling | None:
        return None

    def shaping_of(self, roles: Roles) -> ScoreShaping:
        """Return the shaping of scores, for responses of at most ``roles.max_new_tokens``."""
        del roles
        return self.shaping

    def graph(self, roles: Roles) -> Graph[StepReport]:
        return streamed("grpo", roles, self.advantage(self.shaping_of(roles)), self.samples, self.selection())


SCALES: Final[Mapping[str, GroupAdvantage | Literal["each_reward"]]] = {
    "group": "standardised",
    "batch": "batch_standardised",
    "mean": "max_rl",
    "each_reward": "each_reward",
}


OF_THE_SUM: Final = frozenset({"score_norm", "score_clip", "reward_scale", "missing_eos_penalty"})
"""The settings that shape the weighted sum of rewards."""


@dataclass(frozen=True, kw_only=True)
class GRPO(GroupAlgorithm):
    """GRPO: scores are standardised within the group; the loss, KL included, is a mean over responses."""

    scale_scores: Literal["group", "batch", "mean", "each_reward"] = setting(
        "group",
        "what divides the distance of a score from the mean of its group: the deviation of the `group` or of the "
        "`batch`; or that `mean`, for scores that are not negative (MaxRL); `each_reward`: the deviations of each of "
        "several rewards in the group, then that of their weighted sum in the batch (GDPO)",
    )
    kl_in: KLPlace = "loss"
    kl_estimator: KLEstimator = "k3"
    aggregation: Aggregation = "responses"

    def __post_init__(self) -> None:
        shaped = {key: getattr(self, key) for key in changed(self, OF_THE_SUM)}
        if getattr(self, "long_buffer", 0) != 0:
            shaped["long_buffer"] = getattr(self, "long_buffer", None)
        if self.scale_scores == "each_reward" and shaped:
            raise ConfigError(
                "scale_scores = 'each_reward' compares rewards one by one, and "
                f"{', '.join(f'{key} = {in_toml(value)}' for key, value in shaped.items())} changes their sum: leave "
                "that out (a long_buffer of 0 is none), or make it a reward of its own"
            )
        if self.kl_in == "reward" and self.kl > 0:
            raise ConfigError(
                f"algorithm {type(self).__name__.lower()!r} standardises rewards: where the scores of a group tie, a "
                "KL in them is of full size at any coefficient; put it into the loss, kl_in = 'loss', or take 'rloo'"
            )
        super().__post_init__()

    @property
    def compared(self) -> GroupAdvantage | Literal["each_reward"]:
        return SCALES[self.scale_scores]


@dataclass(frozen=True, kw_only=True)
class RLOO(GroupAlgorithm):
    """RLOO: a response is compared with the mean of the others of its group, the KL penalty included.

    The loss of a response is the sum of its tokens', as of one action, up to a constant factor.
    """

    aggregation: Aggregation = "constant"


@dataclass(frozen=True, kw_only=True)
class DrGRPO(GroupAlgorithm):
    """Dr. GRPO: scores are centred within the group; the loss is divided by a constant; no KL penalty.

    Liu et al. 2025, section 3.2: dividing by the deviation of a group favours prompts whose scores are nearly alike,
    and dividing by the length of a response favours long wrong ones.
    """

    kl: NonNegative = 0.0
    aggregation: Aggregation = "constant"

    @property
    def compared(self) -> GroupAdvantage:
        return "centred"


LONG_PART = 5
"""The penalty on long responses grows over the last ``1 / LONG_PART`` of the longest one, unless settings differ."""


@dataclass(frozen=True, kw_only=True)
class DAPO(GRPO):
    """DAPO: as `grpo`, but clipped later above; groups of equal scores are replaced, long responses punished.

    Yu et al. 2025, section 3: clip-higher, dynamic sampling, the loss as a mean over tokens, soft over-long punishment
    (over 4,096 of 20,480 tokens, section 4.1); no KL penalty.
    """

    kl: NonNegative = 0.0
    clip_high: Positive | None = 0.28
    aggregation: Aggregation = "tokens"
    dynamic_sampling: bool = setting(
        default=True,
        description="replace a group whose scores are all equal by another within the step; with a teacher, which "
        "teaches it all the same (`distill`), none is replaced",
    )
    max_rounds: PositiveCount = setting(
        10, "rounds in which a step replaces groups; after them the run ends with an error"
    )
    long_buffer: Count | None = setting(
        None,
        "the last tokens before `sampling.max_new_tokens`, over which a penalty on the number of sampled tokens "
        "grows; absent: a fifth of `max_new_tokens`; 0: no penalty",
    )
    long_penalty: NonNegative = setting(
        1.0, "subtracted from the reward of a response with `sampling.max_new_tokens` sampled tokens"
    )

    @property
    def selects(self) -> bool:
        """Whether groups are replaced: where scores tie, only a teacher teaches."""
        return self.dynamic_sampling and not self.distills

    def selection(self) -> DynamicSampling | None:
        """Return a new stage that rejects groups whose scores are all equal (section 3.2)."""
        return DynamicSampling(max_rounds=self.max_rounds) if self.selects else None

    def shaping_of(self, roles: Roles) -> ScoreShaping:
        """Return the shaping of scores with the penalty on long responses (section 3.4)."""
        buffer = roles.max_new_tokens // LONG_PART if self.long_buffer is None else self.long_buffer
        begin = roles.max_new_tokens - buffer
        if begin < 0:
            raise ConfigError(
                f"algorithm.long_buffer = {buffer} is more than sampling.max_new_tokens = "
                f"{roles.max_new_tokens}: the penalty grows over the last tokens before that cap"
            )
        return replace(self.shaping, long_from=begin, long_to=roles.max_new_tokens, long_penalty=self.long_penalty)


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GSPO: as `grpo`, but with ratio, clip and importance weight of a whole response; no KL penalty."""

    kl: NonNegative = 0.0
    surrogate: Literal["clip"] = "clip"
    clip: Positive = 3e-4
    clip_high: Positive | None = 4e-4
    credit: Literal["response"] = "response"  # a response has one ratio, and so one advantage

    @property
    def correction(self) -> ImportanceCorrection:
        found = super().correction
        return replace(found, level="sequence") if found.level == "token" else found

    def loss(self) -> SequenceLoss:
        from oppo.losses import SequenceLoss  # noqa: PLC0415 - torch takes seconds to import

        return SequenceLoss(**vars(super().loss()))


@dataclass(frozen=True, kw_only=True)
class RAE(ClippedAlgorithm):
    """RAE: a response is compared with the running mean of its role; neither a critic nor a group.

    Liu et al. 2025, arXiv 2506.24119 (SPIRAL): role-conditioned advantage estimation, for agents that play several.
    """

    kl: NonNegative = 0.0
    aggregation: Aggregation = "constant"
    samples: PositiveCount = setting(1, "responses to each prompt; `step.batch` and `step.overcommit` count prompts")
    decay: Fraction = setting(0.95, "of the running mean: the share that stays of it after each response")

    @property
    def responses(self) -> int:
        return self.samples

    def graph(self, roles: Roles) -> Graph[StepReport]:
        shaped = self.shaping, self.mask_truncated, self.distill_advantage
        estimator = RoleBaseline("leave_one_out", self.reward_kl, self.kl_estimator, *shaped, decay=self.decay)
        return streamed("rae", roles, estimator, self.samples)


@dataclass(frozen=True, kw_only=True)
@validated(ConfigError)
class OnlineDPO:
    """Online DPO: the reward ranks two responses to each prompt, and the loss is DPO's (Guo et al. 2024)."""

    has_critic: ClassVar[bool] = False
    distills: ClassVar[bool] = False
    responses: ClassVar[int] = 2
    refers: ClassVar[bool] = True
    corrects: ClassVar[bool] = False  # stale tokens need no correction: DPO is off-policy

    beta: Positive = setting(0.1, "how strongly the policy is held to the reference")
    mask_truncated: bool = setting(
        default=False, description="leave pairs with a response that ended at max_new_tokens out of the loss"
    )

    def graph(self, roles: Roles) -> Graph[StepReport]:
        estimator = GroupRelative("centred", mask_truncated=self.mask_truncated)
        return streamed("grpo", roles, estimator, self.responses)

    def loss(self) -> Loss:
        from oppo.losses import PairwiseLoss  # noqa: PLC0415 - torch takes seconds to import

        return PairwiseLoss(beta=self.beta)
