"""From the settings of a run to the graph of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, TypeAlias, cast

from oppo.admission import Admission, Continuous, Observation, Overcommit, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.adaptive import SlopeRule
from oppo.admission.chunking import ChunkSize, Fixed, Tuned, WholeRollout
from oppo.algorithms.base import Roles
from oppo.app.checkpoint import State
from oppo.app.supply import Supply
from oppo.config.own import graph_of
from oppo.config.sections import StepSection
from oppo.config.settings import Settings
from oppo.errors import CheckpointError, ConfigError
from oppo.events import StepReport
from oppo.graph import Graph
from oppo.models import ResumableTrainer
from oppo.placement.trainer import HostedTrainer
from oppo.report.log import dump_batch
from oppo.stages import Generate, GroupRelative, InParts, Update

if TYPE_CHECKING:
    from oppo.app.assemble import Assembly

CHECKPOINTED: Final = ("has_learned", "progress", "write", "save", "restore")
"""What a :class:`ResumableTrainer` has besides what every trainer has."""

MakeGraph: TypeAlias = Callable[[Roles], Graph[StepReport]]
"""Makes the graph of a step of the models and the schedule of a run."""


def compose(
    settings: Settings,
    assembly: Assembly,
    prompts: Supply,
    replay: Mapping[int, Observation],
    make: MakeGraph | None = None,
) -> Graph[StepReport]:
    """Return the graph of a run's steps; the controllers observe ``replay`` in the steps that a resumed run repeats.

    Args:
        make: makes another graph than that of ``step.algorithm``. Its stages ``generate`` and ``update`` are a
            :class:`Generate` and an :class:`Update`, whose environment and trainer may be its own.

    Raises:
        GraphError: it has no such stages.
        ConfigError: an algorithm of a file makes none, or it has an environment, and so has ``environment.source``.
    """
    roles = roles_of(settings, assembly)
    graph = graph_of(settings.algorithm, roles) if make is None else make(roles)
    update = graph.stage("update", Update)
    dump = partial(dump_batch, folder=settings.run_directory / "nonfinite")
    generate = graph.stage("generate", Generate)
    if generate.environment is not None and assembly.environment is not None:
        raise ConfigError(
            f"the graph's stage 'generate' has an environment of its own, {type(generate.environment).__name__}, and "
            f"environment.source = {settings.environment.source!r} names another: leave one of them out"
        )
    if settings.step.stream_updates:
        estimator = graph.stage("advantage", GroupRelative)
        graph = graph.replace(advantage=InParts(estimator, settings.algorithm.responses))
    return graph.replace(
        generate=replace(
            generate,
            replay=replay,
            columns=prompts.columns,
            environment=generate.environment or assembly.environment,
        ),
        update=replace(
            update,
            after=awaited(settings.step, update.after),
            max_nonfinite=settings.run.max_nonfinite,
            dump=dump,
        ),
    )


def awaited(step: StepSection, after: Sequence[str]) -> tuple[str, ...]:
    """Return the stages that an update waits for before it publishes: the one that decodes unless in flight."""
    others = [name for name in after if name != "generate"]
    return tuple(others if step.publish == "in-flight" else ("generate", *others))


def trainer_of(graph: Graph[StepReport]) -> ResumableTrainer:
    """Return the trainer of a graph, which a run checkpoints, saves and watches.

    Raises:
        ConfigError: it cannot be checkpointed.
    """
    trainer = graph.stage("update", Update).trainer
    if lacking := [name for name in CHECKPOINTED if not hasattr(trainer, name)]:
        raise ConfigError(
            f"the trainer of the graph's stage 'update', {type(trainer).__name__}, has no {', '.join(lacking)}, so a "
            "run could neither be saved nor resumed: write what oppo.models.ResumableTrainer lists, or derive it from "
            "oppo.placement.trainer.HostedTrainer; a program without a run directory opens the graph itself"
        )
    return cast("ResumableTrainer", trainer)


def kind_of(trainer: ResumableTrainer) -> str:
    """Return the name of a trainer's class, or of what it hosts, which checkpoints record."""
    return type(trainer.core if type(trainer) is HostedTrainer else trainer).__name__


def require_trainer(state: State, trainer: ResumableTrainer) -> None:
    """Check that a checkpoint is of a trainer of this kind.

    Raises:
        CheckpointError: it is of another.
    """
    was = state.get("trainer", kind_of(trainer))
    if was != kind_of(trainer):
        raise CheckpointError(
            f"the run was trained by {was}, and would go on with {kind_of(trainer)}: a run with a graph of its own is "
            "resumed by the program that began it, with oppo.train(directory, graph=...)"
        )


def roles_of(settings: Settings, assembly: Assembly) -> Roles:
    """Return the models and the schedule of a run."""
    return Roles(
        policy=assembly.policy,
        reference=assembly.reference,
        reward=assembly.reward,
        critic=assembly.critic,
        proximal=assembly.proximal,
        trainer=assembly.trainer,
        admission=settings.own_admission() or admission_of(settings.step),
        chunks=chunks_of(settings.step, settings.sampling.max_new_tokens),
        max_new_tokens=settings.sampling.max_new_tokens,
    )


def admission_of(step: StepSection) -> Admission:
    """Return the policy of ours that ``step.admission`` names."""
    most = step.most_extra
    if step.admission == "overcommit":
        return Overcommit(step.batch, most, step.max_deferrals)
    if step.admission == "continuous":
        return Continuous(step.batch, most, step.max_deferrals)
    if step.admission == "tail-batched":
        return TailBatched(step.batch)
    if step.admission == "adaptive":
        return TailAdaptive(step.batch, price=step.lag_price, max_deferrals=step.max_deferrals, most=most)
    rule: SlopeRule = "text" if step.admission == "slope" else "algorithm1"
    return SlopeAdaptive(step.batch, rule=rule, most=most, max_deferrals=step.max_deferrals)


def chunks_of(step: StepSection, cap: int) -> ChunkSize:
    """Return the chunk size that ``step.chunk`` names, for responses of up to ``cap`` tokens."""
    if step.chunk == "whole":
        return WholeRollout()
    return Tuned(cap) if step.chunk == "tuned" else Fixed(step.chunk)
