"""``python -m benchmarks.convergence.one REQUEST ANSWER``: a run in a process of its own, with JSON in and out.

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
    """Return the outcome of a run in a process of its own.

    Raises:
        CalledProcessError: it failed; its output is on standard error.
    """
    return Outcome.of(_answer({"plan": asdict(plan), "arm": cell.arm, "seed": cell.seed}))


def start(plan: Plan) -> Answers:
    """Return the answers of the base policy, which is made first if it is missing.

    Raises:
        CalledProcessError: the process failed.
    """
    return answers_of(_answer({"plan": asdict(plan)}))


def _answer(request: Mapping[str, object]) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        command = [sys.executable, "-m", "benchmarks.convergence.one", json.dumps(request), str(answer)]
        subprocess.run(command, cwd=CHECKOUT, check=True)
        content: Mapping[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return content


def main(request: str, answer: str) -> None:
    from benchmarks.convergence import training  # noqa: PLC0415 - only this process needs torch

    cell = json.loads(request)
    plan = Plan(**cell["plan"])
    assets = training.assets_of(plan)
    if "arm" in cell:
        with tempfile.TemporaryDirectory() as runs:
            done: Outcome | Answers = training.train(plan, ARMS[cell["arm"]], cell["seed"], assets, Path(runs))
    else:
        done = training.answers(plan, assets, assets.actor)
    Path(answer).write_text(json.dumps(asdict(done)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
