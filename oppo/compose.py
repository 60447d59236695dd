"""From the settings of a run to the graph of its steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from oppo.admission import Admission, Observation, Overcommit, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.slope import SlopeRule
from oppo.chunking import ChunkSize, Fixed, Tuned, WholeRollout
from oppo.config import Settings
from oppo.estimators import AdaptiveKL
from oppo.events import StepReport
from oppo.graph import Graph
from oppo.recipes import grpo, ppo
from oppo.report.dump import dump_batch
from oppo.sections import StepSection
from oppo.shaping import ScoreShaping
from oppo.stages import Generate, Update

if TYPE_CHECKING:
    from oppo.hf.assemble import Assembly


def compose(settings: Settings, assembly: Assembly, replay: Mapping[int, Observation]) -> Graph[StepReport]:
    """Return the graph of a run's steps; for steps made again, its controllers observe ``replay``."""
    graph = recipe(settings, assembly)
    dump = partial(dump_batch, folder=settings.run_directory / "nonfinite")
    return graph.replace(
        generate=replace(graph.stage("generate", Generate), replay=replay),
        update=replace(graph.stage("update", Update), max_nonfinite=settings.run.max_nonfinite, dump=dump),
    )


def recipe(settings: Settings, assembly: Assembly) -> Graph[StepReport]:
    """Return the graph of the algorithm that ``step.algorithm`` names."""
    step = settings.step
    shaping = ScoreShaping(
        norm=step.score_norm,
        clip=math.inf if step.score_clip is None else step.score_clip,
        scale=step.reward_scale,
        missing_eos_penalty=step.missing_eos_penalty,
    )
    admission, chunks = admission_of(step), chunks_of(step, settings.sampling.max_new_tokens)
    if assembly.critic is None:
        return grpo(
            policy=assembly.policy,
            reference=assembly.reference,
            reward=assembly.reward,
            proximal=assembly.proximal,
            trainer=assembly.trainer,
            admission=admission,
            samples=step.group,
            advantage="leave_one_out" if step.algorithm == "rloo" else "standardised",
            chunks=chunks,
            kl=reward_kl(step),
            kl_estimator=step.kl_estimator,
            shaping=shaping,
        )
    return ppo(
        policy=assembly.policy,
        reference=assembly.reference,
        reward=assembly.reward,
        critic=assembly.critic,
        proximal=assembly.proximal,
        trainer=assembly.trainer,
        admission=admission,
        chunks=chunks,
        kl=reward_kl(step),
        kl_estimator=step.kl_estimator,
        gamma=step.gamma,
        lam=step.lam,
        shaping=shaping,
        whiten_rewards=step.whiten_rewards,
    )


def admission_of(step: StepSection) -> Admission:
    """Return the policy that ``step.admission`` names."""
    if step.admission == "overcommit":
        return Overcommit(step.batch, step.extra or 0, step.max_deferrals)
    if step.admission == "tail-batched":
        return TailBatched(step.batch)
    most = step.batch // 4 if step.extra is None else step.extra
    if step.admission == "adaptive":
        return TailAdaptive(step.batch, price=step.lag_price, max_deferrals=step.max_deferrals, most=most)
    rule: SlopeRule = "text" if step.admission == "slope" else "algorithm1"
    return SlopeAdaptive(step.batch, rule=rule, most=most, max_deferrals=step.max_deferrals)


def chunks_of(step: StepSection, cap: int) -> ChunkSize:
    """Return the chunk size that ``step.chunk`` names, for responses of up to ``cap`` tokens."""
    if step.chunk == "whole":
        return WholeRollout()
    return Tuned(cap) if step.chunk == "tuned" else Fixed(step.chunk)


def reward_kl(step: StepSection) -> float | AdaptiveKL:
    """Return the weight of the KL penalty in the reward: none where it is in the loss."""
    if step.kl_target is not None and step.kl_horizon is not None:
        return AdaptiveKL(step.kl, step.kl_target, step.kl_horizon)
    return step.kl if step.kl_in == "reward" else 0.0
