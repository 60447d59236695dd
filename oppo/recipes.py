"""Recipes: whole algorithms as graphs of a few lines. Copy one and change it; that is what they are for."""

from __future__ import annotations

from typing import SupportsFloat

from oppo.admission import Admission
from oppo.chunking import ChunkSize, Fixed
from oppo.errors import ConfigError
from oppo.estimators import AdaptiveKL, FixedKL, GroupAdvantage, KLEstimator
from oppo.events import Drop, FloatArray, Prompt, StepReport, merge_chunks, rollout_of
from oppo.graph import Graph, GraphBuilder
from oppo.models import Policy, Scorer, Trainer
from oppo.numeric import require_whole
from oppo.shaping import ScoreShaping
from oppo.stages import GAE, Generate, GroupRelative, Score, Update
from oppo.stages.update import followers


def ppo(
    *,
    policy: Policy,
    reference: Scorer[FloatArray],
    reward: Scorer[float | Drop],
    critic: Scorer[FloatArray],
    trainer: Trainer,
    admission: Admission,
    proximal: Scorer[FloatArray] | None = None,
    chunks: ChunkSize | None = None,
    kl: SupportsFloat | FixedKL | AdaptiveKL = 0.05,
    kl_estimator: KLEstimator = "k1",
    gamma: float = 1.0,
    lam: float = 0.95,
    shaping: ScoreShaping | None = None,
    whiten_rewards: bool = False,
) -> Graph[StepReport]:
    """Return PPO with a learned or rule-based reward and a critic (Ziegler et al. 2019), streamed.

    Args:
        policy: the actor that decodes.
        reference: log-probs of the frozen reference model, float32 [n] for a response of n tokens.
        reward: the score of a finished response, or a ``Drop`` where there is none.
        critic: values of the states before each response token, float32 [n].
        trainer: trains actor and critic; its weights are published to ``policy``, and to what else follows them.
        admission: batch size, overcommit and the cut.
        proximal: log-probs under the weights that are about to be updated, float32 [n], which the trainer's corrections
            for stale tokens need; ``None``: those of the policy that sampled the tokens stand for them.
        chunks: how many tokens travel at once; 32 unless given.
        kl: coefficient of the KL penalty in the reward, or a controller for it.
        kl_estimator: how a token's KL to the reference is estimated.
        gamma: discount.
        lam: lambda of generalised advantage estimation.
        shaping: what is made of the scores before they are rewards; nothing unless given.
        whiten_rewards: scale the rewards of a batch to unit variance.
    """
    capacity = max(16, 4 * admission.batch)  # events of all rollouts in flight: a busy scorer wakes to all of them
    g: GraphBuilder[Prompt] = GraphBuilder("ppo", capacity=capacity, merge=merge_chunks, key=rollout_of)
    rollout = g.add("generate", Generate(policy, admission, chunks or Fixed()), g.prompts)
    ref = g.add("ref_logp", Score(reference), rollout)
    score = g.add("reward", Score(reward), rollout)
    value = g.add("value", Score(critic), rollout)
    shaping = shaping or ScoreShaping()
    estimator = GAE(gamma, lam, kl, kl_estimator, shaping=shaping, whiten_rewards=whiten_rewards)
    again = None if proximal is None else g.add("proximal", Score(proximal), rollout)
    batch = g.add("advantage", estimator, rollout, ref, score, value, proximal=again)
    return g.build(g.add("update", Update(trainer, publish=followers(policy, critic, proximal)), batch))


def grpo(
    *,
    policy: Policy,
    reward: Scorer[float | Drop],
    trainer: Trainer,
    admission: Admission,
    samples: int = 8,
    advantage: GroupAdvantage = "standardised",
    reference: Scorer[FloatArray] | None = None,
    proximal: Scorer[FloatArray] | None = None,
    chunks: ChunkSize | None = None,
    kl: SupportsFloat | FixedKL | AdaptiveKL = 0.0,
    kl_estimator: KLEstimator = "k1",
    shaping: ScoreShaping | None = None,
) -> Graph[StepReport]:
    """Return training without a critic, streamed: the responses to one prompt are compared with one another.

    GRPO (Shao et al. 2024) unless told otherwise; RLOO (Ahmadian et al. 2024) with ``advantage="leave_one_out"`` and
    ``kl=0.05``; Dr. GRPO (Liu et al. 2025) with ``advantage="centred"``. GRPO's own KL is in its trainer's loss,
    ``ClippedLoss(kl=0.04, kl_estimator="k3")``, which is a mean over all tokens of a minibatch, as with DAPO (Yu et al.
    2025, arXiv 2503.14476), and not over those of each response first, as with GRPO.

    What is not named here is as for :func:`ppo`.

    Args:
        trainer: trains the actor.
        admission: groups in a batch, overcommit and the cut: what it counts are whole groups.
        samples: responses to each prompt, a group.
        advantage: how they are compared; see :func:`oppo.estimators.group_advantages`.
        reference: ``None`` where no KL to one is asked for, here or in the loss.
        kl: coefficient of the KL penalty in what a response is worth, or a controller for it; none where that is
            ``standardised``.
        shaping: what is made of the scores before they are compared; nothing unless given.

    Raises:
        ConfigError: there are fewer than two samples, or a KL penalty is standardised or without a reference.
    """
    require_whole("samples", samples, error=ConfigError)
    if samples < 2:
        raise ConfigError(f"samples must be 2 or more, not {samples}: a response alone has nothing to be compared with")
    estimator = GroupRelative(advantage, kl, kl_estimator, shaping or ScoreShaping())
    if reference is None and estimator.refers:
        raise ConfigError(f"a KL penalty, kl = {kl}, is one to a reference: give one, or leave kl at 0")
    capacity = max(16, 4 * admission.batch * samples)
    g: GraphBuilder[Prompt] = GraphBuilder("grpo", capacity=capacity, merge=merge_chunks, key=rollout_of)
    rollout = g.add("generate", Generate(policy, admission, chunks or Fixed(), samples), g.prompts)
    score = g.add("reward", Score(reward), rollout)
    ref = None if reference is None else g.add("ref_logp", Score(reference), rollout)
    again = None if proximal is None else g.add("proximal", Score(proximal), rollout)
    batch = g.add("advantage", estimator, rollout, score, reference=ref, proximal=again)
    return g.build(g.add("update", Update(trainer, publish=followers(policy, proximal)), batch))
