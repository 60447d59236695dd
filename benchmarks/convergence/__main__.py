"""``python -m benchmarks.convergence [--study NAME] [--seeds N]``: run what is missing of a study; write its figure.

A study that was stopped goes on where it was; more ``--seeds`` enlarge it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

import anyio

from benchmarks import CHECKOUT
from benchmarks.convergence import one
from benchmarks.convergence.figure import figure
from benchmarks.convergence.missing import complete
from benchmarks.convergence.page import placed
from benchmarks.convergence.results import Plan, Results
from benchmarks.convergence.studies import STUDIES
from benchmarks.convergence.study import Study
from benchmarks.machine import Machine, cores_here

HERE: Final = Path(__file__).parent
PAGE: Final = CHECKOUT / "docs" / "learning.md"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = options()
    chosen = parser.parse_args(arguments)
    cores = len(cores_here())
    if not 1 <= chosen.jobs <= cores:
        parser.error(f"--jobs: expected 1 to {cores}, as many as there are cores, got {chosen.jobs}")
    study = STUDIES[chosen.study]
    file = chosen.out / study.file
    if not (chosen.table or chosen.page):
        plan = Plan(chosen.steps, chosen.batch, chosen.examined, chosen.small, chosen.jobs)
        make(study, file, plan, chosen.seeds)
    if not file.exists() or not (results := Results.load(file, study.arms)).whole():
        parser.error(f"{file} has no seed of which every arm has been run")
    picture = (PAGE.parent if chosen.page else chosen.out) / study.picture
    picture.write_text(figure(study, results), encoding="utf-8")
    if chosen.page:
        page = placed(PAGE.read_text(encoding="utf-8"), study.begin, study.section(results))
        PAGE.write_text(page, encoding="utf-8")
    print(study.table(results), study.findings(results), sep="\n\n")


def options() -> argparse.ArgumentParser:
    """Return the reader of the command line."""
    default = Plan()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--study", choices=STUDIES, default=next(iter(STUDIES)), help="what is compared")
    parser.add_argument("--seeds", type=int, default=8, help="of every arm")
    parser.add_argument("--jobs", type=int, default=default.jobs, help="runs at a time, which share the cores")
    parser.add_argument("--steps", type=int, default=default.steps, help="of PPO, in every run")
    parser.add_argument("--batch", type=int, default=default.batch, help="rollouts in a step")
    parser.add_argument("--examined", type=int, default=default.examined, help="held-out prompts")
    parser.add_argument("--small", action="store_true", help="tiny models, to try it out")
    parser.add_argument("--out", type=Path, default=HERE, help="where the results and the figure are")
    parser.add_argument("--table", action="store_true", help="print what has been found; run nothing")
    parser.add_argument("--page", action="store_true", help="write it into docs/learning.md; run nothing")
    return parser


def make(study: Study, file: Path, plan: Plan, seeds: int) -> None:
    """Make what is missing of a study."""
    results = Results.go_on(file, study.arms, plan)
    results.machine = results.machine or asdict(Machine.here("cpu"))
    outcome = partial(one.outcome, study.name)
    anyio.run(
        partial(complete, results, file, seeds, start=one.start, outcome=outcome, tell=partial(print, flush=True))
    )


if __name__ == "__main__":
    main()
