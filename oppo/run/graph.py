"""From the settings of a run to the graph of its steps, with evaluations on held-out prompts."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final, TypeAlias, cast

from oppo.admission import Admission, Continuous, Observation, Overcommit, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.chunking import ChunkSize, Fixed, Tuned, WholeRollout
from oppo.admission.overcommit import SlopeRule
from oppo.algorithms.base import Roles
from oppo.config.extensions import graph_of
from oppo.config.sections import DataSection, EvalSection, RunSection, StepSection
from oppo.config.settings import Settings
from oppo.errors import ConfigError, noted
from oppo.evaluation import Evaluate, Evaluation
from oppo.evaluation.evaluate import BEFORE, Progress
from oppo.events import Drop, Prompt, StepReport
from oppo.graph import Graph, Run
from oppo.models import Passes, ResumableTrainer, Sampling, Scorer, VariesSampling
from oppo.placement.trainer import HostedTrainer
from oppo.report.log import dump_batch
from oppo.run.checkpoint import HELD_OUT, Provenance
from oppo.run.prompts import Supply, of_agents
from oppo.stages import Generate, GroupRelative, InParts, Score, Update

CHECKPOINTED: Final = ("has_learned", "progress", "write", "save", "restore")
"""The members of a :class:`ResumableTrainer` besides those of every trainer."""

MakeGraph: TypeAlias = Callable[[Roles], Graph[StepReport]]
"""Makes the graph of a step of the models and the schedule of a run."""


def compose(
    settings: Settings,
    roles: Roles,
    ideal: Mapping[str, Passes],
    prompts: Supply,
    *,
    replay: Mapping[int, Observation],
    make: MakeGraph | None = None,
) -> Graph[StepReport]:
    graph = graph_of(settings.algorithm, roles) if make is None else make(roles)
    update = graph.stage("update", Update)
    dump = partial(dump_batch, folder=settings.run_directory / "nonfinite")
    generate = graph.stage("generate", Generate)
    if generate.environment not in (None, roles.environment) and roles.environment is not None:
        answering = settings.environment.answering
        key = f"environment.{answering}" if answering else "agents.program"
        value = getattr(settings.environment, answering) if answering else settings.agents.program
        raise ConfigError(
            f"the graph's stage 'generate' has an environment of its own, {type(generate.environment).__name__}, and "
            f"{key} = {value!r} names another: leave one of them out"
        )
    if settings.step.stream_updates:
        estimator = graph.stage("advantage", GroupRelative)
        graph = graph.replace(advantage=InParts(estimator, settings.algorithm.responses))
    by_model = {id(getattr(roles, role)): passes for role, passes in ideal.items()}
    models = [
        (name, id(getattr(node.stage, kind, None)))
        for name, node in graph.nodes.items()
        for kind in ("policy", "scorer", "trainer")
    ]
    return graph.replace(
        generate=replace(
            generate,
            replay=replay,
            columns=prompts.columns,
            environment=generate.environment or roles.environment,
        ),
        update=replace(
            update,
            after=stages_before_sync(settings.step, update.after),
            max_nonfinite=settings.run.max_nonfinite,
            dump=dump,
            ideal={name: by_model[model] for name, model in models if model in by_model},
        ),
    )


def stages_before_sync(step: StepSection, after: Sequence[str]) -> tuple[str, ...]:
    # the stages that an update waits for
    others = [name for name in after if name != "generate"]
    return tuple(others if step.weight_sync == "in-flight" else ("generate", *others))


def trainer_of(graph: Graph[StepReport]) -> ResumableTrainer:
    trainer = graph.stage("update", Update).trainer
    if lacking := [name for name in CHECKPOINTED if not hasattr(trainer, name)]:
        raise ConfigError(
            f"the trainer of the graph's stage 'update', {type(trainer).__name__}, has no {', '.join(lacking)}, so a "
            "run could neither be saved nor resumed: write what oppo.models.ResumableTrainer lists, or derive it from "
            "oppo.placement.trainer.HostedTrainer; a program without a run directory opens the graph itself"
        )
    return cast("ResumableTrainer", trainer)


def kind_of(trainer: ResumableTrainer) -> str:
    # checkpoints record it, so that a run goes on with the trainer that began it
    return type(trainer.core if type(trainer) is HostedTrainer else trainer).__name__


def admission_of(step: StepSection) -> Admission:
    most = step.most_overcommit
    if step.admission == "overcommit":
        return Overcommit(step.batch, most, step.max_deferrals)
    if step.admission == "continuous":
        return Continuous(step.batch, most, step.max_deferrals)
    if step.admission == "tail-batched":
        return TailBatched(step.batch)
    if step.admission == "adaptive":
        return TailAdaptive(step.batch, price=step.staleness_price, max_deferrals=step.max_deferrals, most=most)
    rule: SlopeRule = "text" if step.admission == "slope" else "algorithm1"
    return SlopeAdaptive(step.batch, rule=rule, most=most, max_deferrals=step.max_deferrals)


def chunks_of(step: StepSection, cap: int) -> ChunkSize:
    if step.chunk == "whole":
        return WholeRollout()
    return Tuned(cap) if step.chunk == "tuned" else Fixed(step.chunk)


STAGE: Final = "evaluate"  # the name of the stage
SCORE: Final = "eval/score"  # the metric by which the best checkpoint is chosen


def is_due(index: int, every: int, steps: int) -> bool:
    return every > 0 and ((index + 1) % every == 0 or index + 1 == steps)


def evaluates(run: RunSection, section: EvalSection, steps: int, index: int) -> bool:
    return is_due(index, section.every, steps) or (run.keep_best and is_due(index, run.checkpoint_every, steps))


def with_evaluations(
    graph: Graph[StepReport],
    chosen: EvalSection,
    reward: Scorer[float | Drop],
    sampling: Sampling,
    held_out: Sequence[Prompt],
    *,
    due: Callable[[int], bool],
    data: DataSection,
    batch: int,
    by_rule: bool,
) -> Graph[StepReport]:
    if not held_out:
        return graph
    generate = graph.stage("generate", Generate)
    scoring = [
        name for name, node in graph.nodes.items()
        if isinstance(node.stage, Score) and node.stage.scorer is reward
    ]  # fmt: skip
    policy = generate.policy
    if not policy.capabilities.varies_sampling:
        raise ConfigError(
            f"[eval] needs a policy that can draw in another way, and {type(policy).__name__} cannot, by its "
            "capabilities.varies_sampling: see oppo.models.VariesSampling, or leave eval.prompts out"
        )
    drawing = cast("VariesSampling", policy)
    passes = 1.0 if by_rule else None
    evaluation = Evaluation(
        prompts=held_out,
        reward=reward,
        greedy=drawing.with_sampling(replace(sampling, temperature=0.0, seed=chosen.seed)),
        sampled=drawing.with_sampling(replace(sampling, seed=chosen.seed)) if chosen.samples > 1 else None,
        samples=chosen.samples,
        batch=chosen.batch or batch,
        pass_score=passes if chosen.pass_score is None else chosen.pass_score,
        environment=generate.environment,
        asking=lambda prompts: of_agents(prompts, generate.environment, data),
    )
    evaluate = Evaluate(evaluation, due, after=("generate", *scoring))
    update = replace(graph.stage("update", Update), held=(STAGE,))
    return graph.replace(update=update).then(STAGE, evaluate)


def show_progress(graph: Graph[StepReport], progress: Progress) -> None:
    if (stage := _stage(graph)) is not None:
        stage.progress = progress


def _stage(graph: Graph[StepReport]) -> Evaluate | None:
    return graph.stage(STAGE, Evaluate) if STAGE in graph.nodes else None


async def evaluate_first(graph: Graph[StepReport], running: Run[StepReport]) -> None:
    stage = _stage(graph)
    if stage is not None:
        with noted("in the evaluation before the first step"):
            evaluated = await stage.evaluation.measure(BEFORE, stage.progress)
        running.tell(STAGE, evaluated)


def judged(section: EvalSection, provenance: Provenance, report: StepReport) -> tuple[float, str]:
    # scores of other held-out prompts are of something else; a step without an evaluation has NaN
    if not section.prompts:
        return report.score, "score"
    digests = {name: digest for name, digest in provenance.files.items() if name.startswith(HELD_OUT)}
    of = hashlib.sha256(json.dumps([digests, section.count], sort_keys=True).encode()).hexdigest()
    return report.metrics.get(SCORE, float("nan")), f"{SCORE} of {of[:16]}"
