"""``python -m benchmarks.vllm.learning``: what the demo's models learn on vLLM, beside the study on transformers.

The plan is that of ``benchmarks/convergence``, its streamed schedule with nothing deferred, with fewer steps.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Final

import anyio
from rich.console import Console

from benchmarks import CHECKOUT
from benchmarks.convergence.results import Plan, Results
from benchmarks.convergence.runs import answers, assets_of, demo_of
from benchmarks.convergence.studies import CHUNK, SCHEDULES
from benchmarks.harness import command, keep, on_this_machine, require_writable
from benchmarks.vllm.cases import made_with
from oppo.demo.run import settings_of
from oppo.errors import DataError
from oppo.log import logger
from oppo.run.train import FINAL, prepare, run

# Fewer than the study on transformers made: by then its worst seed had gained three quarters of the final mean
STEPS: Final = 10

EXAMINED: Final = 128  # held-out prompts that a policy answers

SEEDS: Final = 3


@dataclass(frozen=True, slots=True)
class Learning:
    """Mean scores of answers to held-out prompts."""

    before: float  # of the base policy
    after: tuple[float, ...]  # of the policies that were trained with vLLM, by seed
    transformers: float  # what the study on transformers gained in the mean, in more steps
    seeds: int  # of that study

    @property
    def gains(self) -> tuple[float, ...]:
        return tuple(after - self.before for after in self.after)


def recorded() -> tuple[Plan, tuple[float, ...]]:
    """Return the plan of the committed study, and what each of its seeds gained with the streamed schedule."""
    results = Results.load(CHECKOUT / "benchmarks" / "convergence" / SCHEDULES.file, SCHEDULES.arms)
    scores = [outcome.answers.score.mean for cell, outcome in results.outcomes.items() if cell.arm == CHUNK.name]
    if results.start is None or not scores:
        raise DataError("benchmarks/convergence holds no runs of the streamed schedule: make them first")
    return results.plan, tuple(score - results.start.score.mean for score in scores)


def measure(folder: Path, seeds: int = SEEDS) -> Learning:
    study, gained = recorded()
    plan = replace(study, steps=STEPS, examined=EXAMINED)
    assets = assets_of(plan)
    before, after = answers(plan, assets, assets.actor).score.mean, list[float]()
    for seed in range(seeds):
        logger.info(f"seed {seed} of {seeds}")
        demo = settings_of(demo_of(plan), assets, folder / f"seed-{seed}", seed, "vllm")
        settings = CHUNK.settings(demo, plan.batch)
        with prepare(settings) as session:
            anyio.run(run, session, Console(quiet=True))
        after.append(answers(plan, assets, settings.run_directory / FINAL / "actor").score.mean)
    return Learning(before, tuple(after), fmean(gained), len(gained))


def study(*, seeds: int = SEEDS, json: Path | None = None) -> None:
    """Train the demo's policy on vLLM, and show what it gained.

    Args:
        seeds: how many runs.
        json: write the results to this file.
    """
    require_writable({"--json": json})
    with TemporaryDirectory(prefix="oppo-vllm-learning-") as folder:
        found = measure(Path(folder), seeds)
    facts = {"versions": made_with(), "steps": STEPS, "examined": EXAMINED}
    keep(json, on_this_machine({**facts, **asdict(found), "gains": found.gains}))
    gains = ", ".join(f"{gain:+.2f}" for gain in found.gains)
    print(
        f"gained in {STEPS} steps on vLLM: {gains}; on transformers, in all steps of the study: "
        f"{found.transformers:+.2f} in the mean of {found.seeds} seeds"
    )


if __name__ == "__main__":
    sys.exit(command(study))
