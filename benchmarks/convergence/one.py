"""``python -m benchmarks.convergence.one REQUEST ANSWER``: a run in a process of its own, asked and answered in JSON.

The request is ``{"plan": {...}, "arm": ..., "seed": ...}``; without an arm the base policy is examined.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks import CHECKOUT
from benchmarks.convergence.arms import ARMS
from benchmarks.convergence.results import Answers, Cell, Outcome, Plan, answers_of


def outcome(plan: Plan, cell: Cell) -> Outcome:
    """Return what comes of a run, in a process of its own.

    Raises:
        CalledProcessError: it failed; what it said is on standard error.
    """
    return Outcome.of(_asked({"plan": asdict(plan), "arm": cell.arm, "seed": cell.seed}))


def start(plan: Plan) -> Answers:
    """Return how the base policy answers; what every run begins with is made first, if need be.

    Raises:
        CalledProcessError: it could not.
    """
    return answers_of(_asked({"plan": asdict(plan)}))


def _asked(request: Mapping[str, object]) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.convergence.one", json.dumps(request), str(answer)]
        subprocess.run(command, cwd=CHECKOUT, check=True)
        told: Mapping[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return told


def main(request: str, answer: str) -> None:
    """Answer a request."""
    from benchmarks.convergence import training  # noqa: PLC0415 - only this process needs torch

    told = json.loads(request)
    plan = Plan(**told["plan"])
    assets = training.assets_of(plan)
    if "arm" in told:
        with tempfile.TemporaryDirectory() as runs:
            done: Outcome | Answers = training.train(plan, ARMS[told["arm"]], told["seed"], assets, Path(runs))
    else:
        done = training.answers(plan, assets, assets.actor)
    Path(answer).write_text(json.dumps(asdict(done)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
