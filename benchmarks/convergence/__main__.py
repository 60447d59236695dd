"""``python -m benchmarks.convergence [--study NAME] [--seeds N]``: run what is missing of a study; write its figure.

A study that was stopped goes on where it was; more ``--seeds`` enlarge it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from benchmarks.convergence import runs
from benchmarks.convergence.results import Plan, Results
from benchmarks.convergence.studies import STUDIES, figure
from benchmarks.harness import Machine, command, cores_here, placed
from benchmarks.ladder.workloads import Flag
from oppo.errors import ConfigError

HERE: Final = Path(__file__).parent
PAGE: Final = HERE / "README.md"
PLAN: Final = Plan()


def make(
    *,
    study: str = next(iter(STUDIES)),
    seeds: int = 8,
    jobs: int = PLAN.jobs,
    steps: int = PLAN.steps,
    batch: int = PLAN.batch,
    examined: int = PLAN.examined,
    small: Flag = False,
    out: Path = HERE,
    table: Flag = False,
    page: Flag = False,
) -> None:
    """Run what is missing of a study, draw its figure, and print what has been found.

    Args:
        study: what is compared: schedules or lookahead.
        seeds: of every arm.
        jobs: runs at a time, which share the cores.
        steps: of PPO, in every run.
        batch: rollouts in a step.
        examined: held-out prompts.
        small: tiny models, to try it out.
        out: where the results and the figure are.
        table: print what has been found; run nothing.
        page: write it into benchmarks/convergence/README.md; run nothing.

    Raises:
        ConfigError: there is no such study, no seed of which every arm has been run, or a core too few for the jobs.
    """
    cores = len(cores_here())
    if not 1 <= jobs <= cores:
        raise ConfigError(f"--jobs: expected 1 to {cores}, as many as there are cores, got {jobs}")
    if study not in STUDIES:
        raise ConfigError(f"there is no study {study!r}; expected one of {', '.join(STUDIES)}")
    asked = STUDIES[study]
    file = out / asked.file
    if not (table or page):
        results = Results.go_on(file, asked.arms, Plan(steps, batch, examined, small, jobs))
        results.machine = results.machine or asdict(Machine.here())
        outcome = partial(runs.outcome, asked.name)
        anyio.run(partial(runs.complete, results, file, seeds, start=runs.start, outcome=outcome))
    if not file.exists() or not (results := Results.load(file, asked.arms)).whole():
        raise ConfigError(f"{file} has no seed of which every arm has been run")
    picture = (PAGE.parent if page else out) / asked.picture
    picture.write_text(figure(asked, results), encoding="utf-8")
    if page:
        text = placed(PAGE.read_text(encoding="utf-8"), asked.begin, asked.shown(results))
        PAGE.write_text(text, encoding="utf-8")
    print(asked.table(results))


if __name__ == "__main__":
    sys.exit(command(make))
