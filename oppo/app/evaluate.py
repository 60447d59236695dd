"""Evaluations of a run: what ``[eval]`` asks for, as a stage at the end of the run's graph."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, cast

from oppo.app.provenance import HELD_OUT, Provenance
from oppo.config.settings import Settings
from oppo.errors import ConfigError, noted
from oppo.evaluation import Evaluate, Evaluation
from oppo.evaluation.evaluate import BEFORE, Progress
from oppo.events import Prompt, StepReport
from oppo.graph import Graph, Run
from oppo.models import VariesSampling
from oppo.stages import Generate, Score, Update

if TYPE_CHECKING:
    from oppo.app.assemble import Assembly

STAGE: Final = "evaluate"
"""The name of the stage."""

SCORE: Final = "eval/score"
"""The metric by which the best checkpoint is chosen."""


def is_due(index: int, every: int, steps: int) -> bool:
    """Return whether what is done after ``every`` so many steps, and after the last, is done after this; 0: never."""
    return every > 0 and ((index + 1) % every == 0 or index + 1 == steps)


def evaluates(settings: Settings, steps: int, index: int) -> bool:
    """Return whether a run of so many steps is evaluated after this one."""
    run = settings.run
    return is_due(index, settings.eval.every, steps) or (run.keep_best and is_due(index, run.checkpoint_every, steps))


def with_evaluations(
    graph: Graph[StepReport],
    settings: Settings,
    assembly: Assembly,
    held_out: Sequence[Prompt],
    due: Callable[[int], bool],
) -> Graph[StepReport]:
    """Return the graph of a run with evaluations on held-out prompts; without any as it is.

    Args:
        due: whether there is one after the step with an index.

    Raises:
        ConfigError: the policy of the graph cannot draw in other ways.
        GraphError: a stage of the graph has the name of this one.
    """
    if not held_out:
        return graph
    generate = graph.stage("generate", Generate)
    scoring = [
        name for name, node in graph.nodes.items()
        if isinstance(node.stage, Score) and node.stage.scorer is assembly.reward
    ]  # fmt: skip
    evaluate = Evaluate(_evaluation(settings, assembly, generate, held_out), due, after=("generate", *scoring))
    update = replace(graph.stage("update", Update), held=(STAGE,))
    return graph.replace(update=update).then(STAGE, evaluate)


def _evaluation(settings: Settings, assembly: Assembly, generate: Generate, held_out: Sequence[Prompt]) -> Evaluation:
    chosen, policy, sampling = settings.eval, generate.policy, assembly.sampling
    if not policy.capabilities.varies_sampling:
        raise ConfigError(
            f"[eval] needs a policy that can draw in another way, and {type(policy).__name__} cannot, by its "
            "capabilities.varies_sampling: see oppo.models.VariesSampling, or leave eval.prompts out"
        )
    drawing = cast("VariesSampling", policy)
    passes = 1.0 if len(settings.rewards) == 1 and not settings.reward_models else None
    return Evaluation(
        prompts=held_out,
        reward=assembly.reward,
        greedy=drawing.with_sampling(replace(sampling, temperature=0.0, seed=chosen.seed)),
        sampled=drawing.with_sampling(replace(sampling, seed=chosen.seed)) if chosen.samples > 1 else None,
        samples=chosen.samples,
        batch=chosen.batch or settings.step.batch * settings.algorithm.responses,
        pass_score=passes if chosen.pass_score is None else chosen.pass_score,
        environment=generate.environment,
    )


def show_progress(graph: Graph[StepReport], progress: Progress) -> None:
    """Tell ``progress`` of each held-out response from now on."""
    if (stage := _stage(graph)) is not None:
        stage.progress = progress


def _stage(graph: Graph[StepReport]) -> Evaluate | None:
    return graph.stage(STAGE, Evaluate) if STAGE in graph.nodes else None


async def evaluate_first(graph: Graph[StepReport], running: Run[StepReport]) -> None:
    """Evaluate before the first step, and tell the observers of the run; nothing without evaluations.

    Raises:
        Exception: what a model or the reward raised.
    """
    stage = _stage(graph)
    if stage is not None:
        with noted("in the evaluation before the first step"):
            found = await stage.evaluation.measure(BEFORE, stage.progress)
        running.tell(STAGE, found)


def judged(settings: Settings, provenance: Provenance, report: StepReport) -> tuple[float, str]:
    """Return the score of a step by which the best checkpoint is chosen, and what it is a score of.

    Scores of other held-out prompts are of something else; a step without an evaluation has NaN.
    """
    if not settings.eval.prompts:
        return report.score, "score"
    digests = {name: digest for name, digest in provenance.files.items() if name.startswith(HELD_OUT)}
    of = hashlib.sha256(json.dumps([digests, settings.eval.count], sort_keys=True).encode()).hexdigest()
    return report.metrics.get(SCORE, float("nan")), f"{SCORE} of {of[:16]}"
