"""GRPO: the responses to a prompt are compared with one another (Shao et al. 2024, arXiv 2402.03300)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from annotated_types import Ge, Lt

from oppo.admission import Admission
from oppo.algorithms.algorithm import Roles
from oppo.algorithms.clipped import ClippedAlgorithm, KLPlace
from oppo.chunking import ChunkSize, Fixed
from oppo.declared import MOST, setting
from oppo.errors import ConfigError
from oppo.estimators import GroupAdvantage, KLEstimator
from oppo.events import Drop, FloatArray, Prompt, StepReport, merge_chunks, rollout_of
from oppo.graph import Graph, GraphBuilder
from oppo.models import Policy, Scorer, Trainer
from oppo.numeric import require_whole
from oppo.shaping import ScoreShaping
from oppo.stages import Generate, GroupRelative, Score, Selection, Update
from oppo.stages.publishing import followers
from oppo.training import Aggregation
from oppo.turns import Environment


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
    select: Selection | None = None,
    chunks: ChunkSize | None = None,
    environment: Environment | None = None,
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

    Raises:
        ConfigError: there are fewer than two samples, or a KL penalty has no reference.
    """
    require_whole("samples", samples, error=ConfigError)
    if samples < 2:
        raise ConfigError(f"samples must be 2 or more, not {samples}: a response alone has nothing to be compared with")
    estimator = advantage or GroupRelative()
    if reference is None and estimator.refers:
        raise ConfigError(f"the KL penalty, kl = {estimator.kl}, needs a reference: give one, or leave kl at 0")
    capacity = max(16, 4 * admission.batch * samples)
    g: GraphBuilder[Prompt] = GraphBuilder("grpo", capacity=capacity, merge=merge_chunks, key=rollout_of)
    generate = Generate(policy, admission, chunks or Fixed(), samples, select=select, environment=environment)
    rollout = g.add("generate", generate, g.prompts)
    score = g.add("reward", Score(reward), rollout)
    score = score if select is None else g.add("select", select, score)
    ref = None if reference is None else g.add("ref_logp", Score(reference), rollout)
    recomputed = None if proximal is None else Score(proximal, after="update")
    again = None if recomputed is None else g.add("proximal", recomputed, rollout)
    batch = g.add("advantage", estimator, rollout, score, reference=ref, proximal=again)
    update = Update(trainer, publish=followers(policy, recomputed), after=("generate",))
    return g.build(g.add("update", update, batch))


@dataclass(frozen=True, kw_only=True)
class GroupAlgorithm(ClippedAlgorithm):
    """The settings of an algorithm without a critic, which compares the responses to a prompt with one another."""

    compared: ClassVar[GroupAdvantage]
    """The estimator; see :func:`oppo.estimators.group_advantages`."""

    samples: Annotated[int, Ge(2), Lt(MOST)] = setting(
        8, "responses to each prompt, which are compared; `step.batch` and `step.extra` count prompts"
    )

    @property
    def responses(self) -> int:
        """Responses to each prompt."""
        return self.samples

    def selection(self) -> Selection | None:
        """Return a new stage that selects the groups to train; ``None``: all of them."""
        return None

    def shaping_of(self, roles: Roles) -> ScoreShaping:
        """Return the shaping of scores, for responses of at most ``roles.max_new_tokens``."""
        del roles
        return self.shaping

    def graph(self, roles: Roles) -> Graph[StepReport]:
        """Return the graph of a step."""
        return grpo(
            policy=roles.policy,
            reward=roles.reward,
            trainer=roles.trainer,
            admission=roles.admission,
            samples=self.samples,
            advantage=GroupRelative(
                self.compared, self.reward_kl, self.kl_estimator, self.shaping_of(roles), self.mask_truncated
            ),
            reference=roles.reference,
            proximal=roles.proximal,
            select=self.selection(),
            chunks=roles.chunks,
        )


@dataclass(frozen=True, kw_only=True)
class GRPO(GroupAlgorithm):
    """GRPO: scores are standardised within the group; the loss, KL included, is a mean over responses."""

    compared: ClassVar[GroupAdvantage] = "standardised"

    kl_in: KLPlace = "loss"
    kl_estimator: KLEstimator = "k3"
    aggregation: Aggregation = "responses"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kl_in == "reward" and self.kl > 0:
            raise ConfigError(
                f"algorithm {type(self).__name__.lower()!r} standardises rewards: where the scores of a group tie, a "
                "KL in them is of full size at any coefficient; put it into the loss, kl_in = 'loss', or take 'rloo'"
            )
