"""Learn a task of reasoning-gym by its verifier alone, and write the curve to ``results.json``.

::

    pip install 'oppo[reasoning-gym]'
    python -m examples.reasoning_gym.learn

It makes the model if there is none yet, and trains it as ``config.toml`` says. While it trains, the model answers
held-out questions, which occur in neither training.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import oppo
from benchmarks.harness import processor
from examples.reasoning_gym import make_model
from examples.reasoning_gym.make_model import CONFIG, ROWS, TASK
from oppo.errors import OppoError
from oppo.rewards.tasks import task_rows

HERE = Path(__file__).parent

REWARDED = 3
"""Seed of the questions that are answered for the reward; those of the supervised training have another."""

HELD_OUT = 2

Row = Mapping[str, Any]


def installed(name: str) -> str:
    """Return the version of a package; ``"none"`` where another one provides its modules."""
    try:
        return version(name)
    except PackageNotFoundError:
        return "none"


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return ``model``, ``runs``, ``held_out``, ``output`` and ``set``."""
    parser = argparse.ArgumentParser(description=f"Learn {TASK} of reasoning-gym by its verifier.")
    parser.add_argument("--model", type=Path, default=HERE / "model", help="made if it is missing")
    parser.add_argument("--runs", type=Path, default=HERE / "runs")
    parser.add_argument("--held-out", type=int, default=256, help="questions (default: %(default)s)")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="another setting")
    return parser.parse_args(arguments)


def held_out(count: int) -> list[Row]:
    """Return questions, each once, that are not among those of the two trainings."""
    seen = {row["prompt"] for seed in (make_model.SEED, REWARDED) for row in questions(ROWS, seed)}
    fresh: dict[object, Row] = {}
    for row in questions(20 * count, HELD_OUT):
        if row["prompt"] not in seen:
            fresh.setdefault(row["prompt"], row)
    return list(fresh.values())[:count]


def questions(size: int, seed: int) -> list[dict[str, object]]:
    """Return rows of the task."""
    return task_rows(TASK, size=size, seed=seed, **CONFIG)


def curve(directory: Path) -> list[dict[str, float]]:
    """Return what the run measured on held-out questions, by the updates made before."""
    lines = [json.loads(line) for line in (directory / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    names = {
        "right": "eval/passed",
        "score": "eval/score",
        "score_ci95": "eval/score_ci95",
        "drawn_score": "eval/sampled_score",
    }
    return [{"updates": line["step"], **{name: line[key] for name, key in names.items()}} for line in lines]


def learn(options: argparse.Namespace) -> list[dict[str, float]]:
    """Train; print and write the curve, and return it."""
    if not options.model.exists():
        make_model.main(["--output", str(options.model)])
    rows = held_out(options.held_out)
    overrides = [f"models.policy={options.model}", f"run.directory={options.runs}", *options.set]
    run = oppo.train(HERE / "config.toml", overrides, prompts=questions(ROWS, REWARDED), eval_prompts=rows)
    measured = curve(run.path)
    for point in measured:
        score = f"score {point['score']:.3f} +- {point['score_ci95']:.3f}"
        print(f"after {point['updates']:3} updates {point['right']:.3f} are right, {score}")
    document = {
        "task": {"name": TASK, **CONFIG, "held_out": len(rows)},
        "settings": tomllib.loads((HERE / "config.toml").read_text(encoding="utf-8")),
        "set": options.set,
        "versions": {name: installed(name) for name in ("reasoning-gym", "torch", "transformers")},
        "processor": processor(),
        "curve": measured,
    }
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return measured


def main(arguments: Sequence[str] | None = None) -> int:
    """Learn; return 0, or 2 after printing what was wrong."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        learn(options)
    except OppoError as error:
        print(f"learn: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
