"""On-policy distillation: the policy learns the distribution of a teacher on responses of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from oppo.admission import Admission
from oppo.admission.chunking import ChunkSize
from oppo.algorithms.base import Clipped, Roles
from oppo.algorithms.ppo import ppo, streamed
from oppo.declared import Positive, PositiveCount, changed, setting
from oppo.errors import ConfigError
from oppo.events import Drop, FloatArray, StepReport
from oppo.graph import Graph
from oppo.models import Policy, Scorer, Trainer
from oppo.scorers import Lesson, Unscored
from oppo.stages import Distillation, Siblings


def distill(
    *,
    policy: Policy,
    teacher: Scorer[Lesson | Drop],
    trainer: Trainer,
    admission: Admission,
    reward: Scorer[float | Drop] | None = None,
    advantage: Distillation | None = None,
    reference: Scorer[FloatArray] | None = None,
    proximal: Scorer[FloatArray] | None = None,
    chunks: ChunkSize | None = None,
    siblings: Siblings | None = None,
    samples: int = 1,
) -> Graph[StepReport]:
    """Return on-policy distillation, streamed: a teacher reads responses while the policy writes them.

    The advantage of a token is the log-ratio of the teacher to the policy, so that the policy gradient is that of the
    reverse KL (Agarwal et al. 2024, arXiv 2306.13649; Gu et al. 2024, arXiv 2306.08543). To learn the teacher's
    distribution over its likeliest ids instead, give ``advantage=Distillation(0)``, a teacher that lists them
    (:class:`oppo.hf.TeacherLogprobs`) and a trainer with ``loss=ClippedLoss(distill=1.0, distill_beta=1.0)``.

    To learn from scores too, give :func:`oppo.ppo` or :func:`oppo.grpo` a teacher, and their advantage stage a weight,
    ``GroupRelative(distill=0.5)``, or none where the loss has it.

    Other arguments are as for :func:`oppo.ppo`.

    Args:
        teacher: log-probs of the teacher, float32 [n] for a response of n tokens, which reads the policy's tokens; or
            :class:`oppo.returns.TopLogprobs`.
        trainer: trains the actor.
        reward: scores that are measured; ``None``: every score is 0.
        advantage: the weight of the teacher; ``Distillation()`` by default.
        reference: to measure the KL to it.
        siblings, samples: for a teacher that is shown a response that passed, of ``samples`` to each prompt.
    """
    return ppo(
        policy=policy,
        reward=Unscored() if reward is None else reward,
        trainer=trainer,
        admission=admission,
        reference=reference,
        advantage=advantage or Distillation(),
        proximal=proximal,
        chunks=chunks,
        teacher=teacher,
        siblings=siblings,
        samples=samples,
    )


OF_THE_RATIO: Final = frozenset(
    {
        *("surrogate", "dual_clip", "gates", "clip", "clip_high", "ratio_base"),
        *("is_correction", "is_cap", "is_low", "is_high", "is_k3"),
    }
)
"""The settings that the policy loss alone reads."""


@dataclass(frozen=True, kw_only=True)
class Distill(Clipped):
    """On-policy distillation: the policy follows the log-probs of a teacher, `models.teacher`; scores are optional."""

    scoreless: ClassVar[bool] = True

    distill: Positive = 1.0
    samples: PositiveCount = setting(
        1, "responses to each prompt, of which one that passed may be shown to the teacher (`teacher.template`)"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.distill_top_k is not None and (idle := changed(self, OF_THE_RATIO)):
            raise ConfigError(
                f"distill_top_k = {self.distill_top_k} leaves advantages at 0, so there is no policy loss that reads "
                f"{', '.join(sorted(idle))}: leave that out"
            )

    @property
    def responses(self) -> int:
        return self.samples

    def graph(self, roles: Roles) -> Graph[StepReport]:
        if roles.teacher is None:
            raise ConfigError("a distillation learns from the log-probs of a teacher, and got none: give one")
        return streamed("ppo", roles, Distillation(self.distill_advantage, self.mask_truncated), self.samples)
