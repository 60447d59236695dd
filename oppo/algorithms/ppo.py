"""PPO (Ziegler et al. 2019, arXiv 1909.08593) with a critic, REINFORCE++ without one, and a loop that exists already.

:func:`wrap` overlaps a training step of whatever kind; all three score responses while they are written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from oppo.admission import Admission
from oppo.admission.chunking import ChunkSize, Fixed
from oppo.algorithms.base import ClippedAlgorithm, Roles
from oppo.declared import Fraction, NonNegative, Positive, PositiveCount, changed, setting
from oppo.errors import ConfigError
from oppo.events import Drop, FloatArray, Prompt, StepReport, merge_chunks, rollout_of
from oppo.graph import Graph, GraphBuilder
from oppo.models import Policy, Scorer, Trainer
from oppo.placement import Thread
from oppo.returns import Over
from oppo.scorers import Lesson
from oppo.stages import GAE, DynamicSampling, Gather, Generate, Score, Siblings, Update
from oppo.stages.advantage import AdaptiveObjective
from oppo.stages.score import synced_models
from oppo.training import FunctionTrainer, Module, TrainStep
from oppo.turns import Environment

if TYPE_CHECKING:
    from oppo.losses import PPOLoss


def ppo(
    *,
    policy: Policy,
    reward: Scorer[float | Drop],
    trainer: Trainer,
    admission: Admission,
    reference: Scorer[FloatArray] | None = None,
    critic: Scorer[FloatArray] | None = None,
    advantage: AdaptiveObjective | None = None,
    proximal: Scorer[FloatArray] | None = None,
    chunks: ChunkSize | None = None,
    environment: Environment | None = None,
    teacher: Scorer[Lesson | Drop] | None = None,
    siblings: Siblings | None = None,
    samples: int = 1,
) -> Graph[StepReport]:
    """Return PPO with a learned or rule-based reward and a critic (Ziegler et al. 2019), streamed.

    Args:
        policy: the actor that decodes.
        reward: the score of a finished response, or a ``Drop``.
        trainer: trains actor and critic; its weights are synced to ``policy`` and the other synced models.
        admission: batch size, overcommit and the cut.
        reference: log-probs of the frozen reference model, float32 [n] for a response of n tokens; needed for a KL
            penalty, here or in the loss.
        critic: values of the states before each response token, float32 [n]. Without one the advantage of a token is
            the sum of the rewards from it on, whitened over the batch, as in REINFORCE++ (Hu 2025, arXiv 2501.03262).
            It may give one more, the value of the state after the last token, as ``GAE(bootstrap_truncated=True)``
            needs.
        advantage: the stage that estimates advantages, with the KL penalty, gamma, lambda and the shaping of scores;
            ``GAE()`` by default.
        proximal: log-probs under the weights that are about to be updated, float32 [n], which the trainer's corrections
            for stale tokens need; ``None``: the behaviour log-probs stand for them.
        chunks: tokens per chunk; 32 by default.
        environment: answers the turns of a response, so that it goes on after a stop token with a tool's result.
        teacher: log-probs of a teacher, float32 [n], which ``GAE(distill=...)`` adds to the advantages; see
            :func:`oppo.distill`.
        siblings: for a teacher that is shown a response that passed (:class:`oppo.scorers.BehindPrompt`).
        samples: responses to each prompt, none compared with another; ``admission`` counts prompts.
    """
    roles = Roles(
        policy=policy,
        reward=reward,
        trainer=trainer,
        admission=admission,
        reference=reference,
        critic=critic,
        proximal=proximal,
        chunks=chunks or Fixed(),
        environment=environment,
        teacher=teacher,
        siblings=siblings,
    )
    return streamed("ppo", roles, advantage or GAE(), samples)


def streamed(
    name: str, roles: Roles, advantage: AdaptiveObjective, samples: int, select: DynamicSampling | None = None
) -> Graph[StepReport]:
    """Return the graph of a step: all scorers read responses while they are written, and their advantages follow."""
    policy, environment = roles.policy, roles.environment
    generate = Generate(policy, roles.admission, roles.chunks, samples, select=select, environment=environment)
    capacity = max(16, 4 * roles.admission.batch * samples)  # a busy scorer wakes to the events of all rollouts
    g: GraphBuilder[Prompt] = GraphBuilder(name, capacity=capacity, merge=merge_chunks, key=rollout_of)
    rollout = g.add("generate", generate, g.prompts)
    ref = None if roles.reference is None else g.add("ref_logp", Score(roles.reference), rollout)
    score = g.add("reward", Score(roles.reward), rollout)
    score = score if select is None else g.add("select", select, score)
    values = None if roles.critic is None else Score(roles.critic)
    value = None if values is None else g.add("value", values, rollout)
    recomputed = None if roles.proximal is None else Score(roles.proximal, after="update")
    again = None if recomputed is None else g.add("proximal", recomputed, rollout)
    reader = None if roles.teacher is None else Score(roles.teacher)
    read = rollout if roles.siblings is None else g.add("siblings", roles.siblings, rollout, score)
    taught = None if reader is None else g.add("teacher_logp", reader, read)
    batch = g.add("advantage", advantage, rollout, score, reference=ref, value=value, proximal=again, teacher=taught)
    update = Update(roles.trainer, synced=synced_models(policy, values, recomputed, reader), after=("generate",))
    return g.build(g.add("update", update, batch))


def wrap(
    step: TrainStep,
    actor: Module,
    *,
    policy: Policy,
    reward: Scorer[float | Drop],
    admission: Admission,
    reference: Scorer[FloatArray] | None = None,
    critic: Scorer[FloatArray] | None = None,
    critic_module: Module | None = None,
    samples: int = 1,
    chunks: ChunkSize | None = None,
    environment: Environment | None = None,
    place: Thread | None = None,
) -> Graph[StepReport]:
    """Return a loop that exists already as a graph: responses are scored while they are written, and deferred.

    The loop keeps its training step, which takes a :class:`oppo.Batch` with tokens, behaviour log-probs, scores and the
    results of the other scorers, and without rewards, advantages and returns. The policy replaces the loop's call that
    generates, since a call that returns when all responses have ended cannot be streamed.

    Other arguments are as for :func:`oppo.ppo`.

    Args:
        step: trains ``actor`` on a batch, in place, and returns metrics or nothing.
        actor: the module that it trains.
        policy: the actor that decodes, for example :class:`oppo.hf.HfPolicy` on the same module.
        critic_module: the module behind ``critic``, if the step trains it too.
        place: where the step is called; ``None``: on the event loop, where everything else waits for it.
    """
    trainer = FunctionTrainer(step, actor, critic_module, place=place)
    generate = Generate(policy, admission, chunks or Fixed(), samples, environment=environment)
    capacity = max(16, 4 * admission.batch * samples)
    g: GraphBuilder[Prompt] = GraphBuilder("wrapped", capacity=capacity, merge=merge_chunks, key=rollout_of)
    rollout = g.add("generate", generate, g.prompts)
    score = g.add("reward", Score(reward), rollout)
    ref = None if reference is None else g.add("ref_logp", Score(reference), rollout)
    values = None if critic is None else Score(critic)
    value = None if values is None else g.add("value", values, rollout)
    batch = g.add("gather", Gather(), rollout, score, reference=ref, value=value)
    served = synced_models(policy, values) if critic_module is not None else synced_models(policy)
    return g.build(g.add("update", Update(trainer, synced=served, after=("generate",)), batch))


@dataclass(frozen=True, kw_only=True)
class _Discounted(ClippedAlgorithm):
    samples: PositiveCount = setting(
        1,
        "responses to each prompt, which algorithms with groups compare; `step.batch` and `step.overcommit` count "
        "prompts",
    )
    gamma: Fraction = setting(1.0, "discount")
    over: Over = setting(
        "tokens", "what advantages run over: `tokens`, or whole `turns`, each one action; `gamma` and `lam` count those"
    )

    @property
    def responses(self) -> int:
        return self.samples

    def advantage(self) -> GAE:
        return GAE(
            gamma=self.gamma,
            kl=self.reward_kl,
            kl_estimator=self.kl_estimator,
            shaping=self.shaping,
            mask_truncated=self.mask_truncated,
            distill=self.distill_advantage,
            over=self.over,
        )

    def graph(self, roles: Roles) -> Graph[StepReport]:
        return streamed("ppo", roles, self.advantage(), self.samples)


@dataclass(frozen=True, kw_only=True)
class PPO(_Discounted):
    """PPO: advantages from the values of a critic, by generalised advantage estimation."""

    has_critic: ClassVar[bool] = True

    whiten_rewards: bool = setting(default=False, description="scale a batch's rewards to unit variance")
    lam: Fraction = setting(0.95, "lambda of generalised advantage estimation")
    lam_value: Fraction | None = setting(
        None, "lambda of the returns that the critic learns, which may differ (1 in VAPO); absent: as the advantages"
    )
    lam_alpha: Positive | None = setting(
        None,
        "in place of `lam`, a lambda by the length: 1 - 1 / (lam_alpha n) for a response of n tokens, at least 0 (0.05 "
        "in VAPO); absent: `lam` for all",
    )
    value_clip: Positive | Literal["none"] = setting(0.2, "how far a value may move in an update")
    value_coefficient: NonNegative = setting(0.1, "weight of the value loss")

    bootstrap_truncated: bool = setting(
        default=False,
        description="after a response that ended at max_new_tokens, count the critic's value of its last state, not 0",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.lam_alpha is not None and changed(self, {"lam"}):
            raise ConfigError(
                f"lam_alpha = {self.lam_alpha} chooses lambda by the length of a response, in place of lam = "
                f"{self.lam}: leave one of the two out"
            )
        self.advantage()  # which refuses settings that contradict each other

    def advantage(self) -> GAE:
        return replace(
            super().advantage(),
            lam=self.lam,
            lam_value=self.lam_value,
            lam_alpha=self.lam_alpha,
            whiten_rewards=self.whiten_rewards,
            bootstrap_truncated=self.bootstrap_truncated,
        )

    def graph(self, roles: Roles) -> Graph[StepReport]:
        if roles.critic is None:
            raise ConfigError("PPO estimates advantages from the values of a critic, and got none: give one")
        return super().graph(roles)

    def loss(self) -> PPOLoss:
        from oppo.losses import PPOLoss  # noqa: PLC0415 - torch takes seconds to import

        return PPOLoss(
            **vars(super().loss()),
            value_clip=math.inf if self.value_clip == "none" else self.value_clip,
            value_coefficient=self.value_coefficient,
        )


@dataclass(frozen=True, kw_only=True)
class ReinforcePP(_Discounted):
    """REINFORCE++: PPO without a critic; the returns of a batch, KL penalty included, are whitened."""
