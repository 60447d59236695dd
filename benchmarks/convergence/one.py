"""``python -m benchmarks.convergence.one REQUEST ANSWER``: a run in a process of its own, with JSON in and out.

The request is ``{"plan": {...}, "study": ..., "arm": ..., "seed": ...}``; without an arm the base policy is examined.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio

from benchmarks import CHECKOUT
from benchmarks.convergence.results import Answers, Cell, Outcome, Plan, answers_of
from benchmarks.convergence.studies import STUDIES
from benchmarks.machine import cores_here


async def outcome(study: str, plan: Plan, cell: Cell) -> Outcome:
    """Return the outcome of a run in a process of its own, which ends if it is cancelled.

    Raises:
        CalledProcessError: it failed; its output is on standard error.
    """
    return Outcome.of(await _answer(plan, {"study": study, "arm": cell.arm, "seed": cell.seed}))


async def start(plan: Plan) -> Answers:
    """Return the answers of the base policy, which is made first if it is missing.

    Raises:
        CalledProcessError: the process failed.
    """
    return answers_of(await _answer(plan, {}))


async def _answer(plan: Plan, request: Mapping[str, object]) -> Mapping[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        answer = anyio.Path(folder) / "answer.json"
        asked = json.dumps({"plan": asdict(plan), **request})
        command = [sys.executable, "-m", "benchmarks.convergence.one", asked, str(answer)]
        await anyio.run_process(command, stdout=None, stderr=None, cwd=CHECKOUT, env=_environment(plan.jobs))
        content: Mapping[str, Any] = json.loads(await answer.read_text(encoding="utf-8"))
        return content


def _environment(jobs: int) -> dict[str, str]:
    """Return the environment of one of ``jobs`` processes that share the cores."""
    share = {} if jobs == 1 else {"OMP_NUM_THREADS": str(max(1, len(cores_here()) // jobs))}
    return {**os.environ, **share}


def main(request: str, answer: str) -> None:
    from benchmarks.convergence import training  # noqa: PLC0415 - only this process needs torch

    cell = json.loads(request)
    plan = Plan(**cell["plan"])
    assets = training.assets_of(plan)
    if "arm" in cell:
        with tempfile.TemporaryDirectory() as runs:
            arm = STUDIES[cell["study"]].arms[cell["arm"]]
            done: Outcome | Answers = training.train(plan, arm, cell["seed"], assets, Path(runs))
    else:
        done = training.answers(plan, assets, assets.actor)
    Path(answer).write_text(json.dumps(asdict(done)), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
