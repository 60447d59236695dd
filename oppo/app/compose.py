"""From the settings of a run to the graph of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from oppo.admission import Admission, Observation, Overcommit, SlopeAdaptive, TailAdaptive, TailBatched
from oppo.admission.slope import SlopeRule
from oppo.algorithms.algorithm import Roles
from oppo.app.settings import Settings, StepSection
from oppo.chunking import ChunkSize, Fixed, Tuned, WholeRollout
from oppo.data import PromptStream
from oppo.events import StepReport
from oppo.graph import Graph
from oppo.report.dump import dump_batch
from oppo.stages import Generate, Update

if TYPE_CHECKING:
    from oppo.app.assemble import Assembly


MakeGraph: TypeAlias = Callable[[Roles], Graph[StepReport]]
"""Makes the graph of a step of the models and the schedule of a run."""


def compose(
    settings: Settings,
    assembly: Assembly,
    prompts: PromptStream,
    replay: Mapping[int, Observation],
    make: MakeGraph | None = None,
) -> Graph[StepReport]:
    """Return the graph of a run's steps; the controllers observe ``replay`` in the steps that a resumed run repeats.

    Args:
        make: makes another graph than that of ``step.algorithm``. Its stages ``generate`` and ``update`` are a
            :class:`Generate` and an :class:`Update`.

    Raises:
        GraphError: it has no such stages.
    """
    graph = (make or settings.algorithm.graph)(roles_of(settings, assembly))
    dump = partial(dump_batch, folder=settings.run_directory / "nonfinite")
    return graph.replace(
        generate=replace(
            graph.stage("generate", Generate),
            replay=replay,
            columns=prompts.columns,
            environment=assembly.environment,
        ),
        update=replace(graph.stage("update", Update), max_nonfinite=settings.run.max_nonfinite, dump=dump),
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
        admission=admission_of(settings.step),
        chunks=chunks_of(settings.step, settings.sampling.max_new_tokens),
        max_new_tokens=settings.sampling.max_new_tokens,
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
