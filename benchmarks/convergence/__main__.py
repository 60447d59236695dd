"""``python -m benchmarks.convergence [--seeds N]``: run what is missing of the study, then write table and figure.

A study that was stopped goes on where it was; more ``--seeds`` enlarge it.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Final

from benchmarks import CHECKOUT
from benchmarks.convergence import one
from benchmarks.convergence.figure import figure
from benchmarks.convergence.page import findings, placed, section, table
from benchmarks.convergence.results import FILE, Plan, Results
from benchmarks.convergence.study import study
from benchmarks.machine import Machine

HERE: Final = Path(__file__).parent
PAGE: Final = CHECKOUT / "docs" / "learning.md"


def main() -> None:
    default = Plan()
    parser = argparse.ArgumentParser(prog="python -m benchmarks.convergence", description=__doc__)
    parser.add_argument("--seeds", type=int, default=8, help="of every arm")
    parser.add_argument("--steps", type=int, default=default.steps, help="of PPO, in every run")
    parser.add_argument("--batch", type=int, default=default.batch, help="rollouts in a step")
    parser.add_argument("--examined", type=int, default=default.examined, help="held-out prompts")
    parser.add_argument("--small", action="store_true", help="tiny models, to try it out")
    parser.add_argument("--out", type=Path, default=HERE, help="where results.json and convergence.svg are")
    parser.add_argument("--table", action="store_true", help="print what has been found; run nothing")
    parser.add_argument("--page", action="store_true", help="write it into docs/learning.md; run nothing")
    chosen = parser.parse_args()
    if not (chosen.table or chosen.page):
        results = Results.go_on(chosen.out, Plan(chosen.steps, chosen.batch, chosen.examined, chosen.small))
        results.machine = results.machine or asdict(Machine.here("cpu"))
        study(
            results,
            chosen.out,
            chosen.seeds,
            start=one.start,
            outcome=one.outcome,
            tell=partial(print, flush=True),
        )
    if not (chosen.out / FILE).exists() or not Results.load(chosen.out).whole():
        parser.error(f"{chosen.out} has no seed of which every arm has been run")
    results = Results.load(chosen.out)
    picture = (PAGE.parent if chosen.page else chosen.out) / "convergence.svg"
    picture.write_text(figure(results), encoding="utf-8")
    if chosen.page:
        PAGE.write_text(placed(PAGE.read_text(encoding="utf-8"), section(results)), encoding="utf-8")
    print(table(results), findings(results), sep="\n\n")


if __name__ == "__main__":
    main()
