"""Compare the trained model with the one it came from, on questions that neither was trained on.

Both answer every question with the same sampling noise, so that what differs is the model and not the draw::

    python -m examples.reasoning_gym.evaluate --after examples/reasoning_gym/runs/sums/checkpoints/final/actor

It prints the share of right answers, drawn and greedy, with the paired differences and their intervals, and writes all
of it to ``results.json``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import anyio
import numpy as np

from examples.reasoning_gym.make_model import CONFIG, ROWS, SEED, TASK
from oppo.app.evaluate import Comparison, compare, respond
from oppo.errors import OppoError
from oppo.events import FloatArray, Prompt
from oppo.gym import task_rows, verify
from oppo.hf.cpu import use_cores
from oppo.hf.loading.models import load_causal, load_tokenizer
from oppo.hf.serve.policy import HfPolicy
from oppo.hf.text import Text
from oppo.models import Sampling
from oppo.placement import Thread

HERE = Path(__file__).parent

REWARDED = 3
"""Seed of the questions of ``config.toml``."""

Row = Mapping[str, Any]


def parse_arguments(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the command line's settings; the length is that of ``config.toml``."""
    parser = argparse.ArgumentParser(description="Count the right answers of two models to held-out questions.")
    parser.add_argument("--before", default=str(HERE / "model"), help="model directory (default: %(default)s)")
    parser.add_argument("--after", required=True, help="directory of the trained actor")
    parser.add_argument("--questions", type=int, default=512)
    parser.add_argument("--task-seed", type=int, default=2, help="of the questions; not one trained with")
    parser.add_argument("--seed", type=int, default=11, help="of the sampling noise")
    parser.add_argument("--max-new-tokens", type=int, default=6)
    parser.add_argument("--answers", type=int, default=24, help="how many are written with their text")
    parser.add_argument("--output", type=Path, default=HERE / "results.json")
    return parser.parse_args(arguments)


def held_out(options: argparse.Namespace) -> list[Row]:
    """Return questions, each once, that are not among those of the two trainings."""
    seen = {row["prompt"] for seed in (SEED, REWARDED) for row in task_rows(TASK, size=ROWS, seed=seed, **CONFIG)}
    fresh: dict[object, Row] = {}
    for row in task_rows(TASK, size=20 * options.questions, seed=options.task_seed, **CONFIG):
        if row["prompt"] not in seen:
            fresh.setdefault(row["prompt"], row)
    return list(fresh.values())[: options.questions]


async def answers(directory: str, rows: Sequence[Row], temperature: float, options: argparse.Namespace) -> list[str]:
    """Return the answer of the model in ``directory`` to every question, decoded side by side."""
    text = Text(load_tokenizer(directory))
    sampling = Sampling(
        max_new_tokens=options.max_new_tokens,
        temperature=temperature,
        stop=text.stop((), ()),
        seed=options.seed,
    )
    prompts = [
        Prompt(number, number, np.array(text.encode(str(row["prompt"])), np.int32)) for number, row in enumerate(rows)
    ]
    with Thread("policy", setup=lambda: use_cores(1)) as thread:
        model = await thread.call("load", load_causal, directory)
        finished = await respond(HfPolicy(model, sampling=sampling, thread=thread), prompts)
    return [text.decode(each.response.tokens.tolist()) for each in finished]


def scored(completions: Sequence[str], rows: Sequence[Row]) -> FloatArray:
    """Return the verifier's score of each completion, float32 [N]."""
    columns = {name: [row[name] for row in rows] for name in ("question", "answer", "metadata")}
    return np.array(verify([], completions, **columns), np.float32)


async def evaluate(options: argparse.Namespace) -> dict[str, Comparison]:
    """Answer with both models, drawn and greedy; print the comparisons, and write them with the answers."""
    rows = held_out(options)
    document: dict[str, object] = {
        "settings": {name: str(value) for name, value in vars(options).items()},
        "task": {"name": TASK, **CONFIG},
        "questions": len(rows),
    }
    found: dict[str, Comparison] = {}
    said: list[dict[str, object]] = [{"question": row["question"], "answer": row["answer"]} for row in rows]
    for name, temperature in (("drawn", 1.0), ("greedy", 0.0)):
        both = [await answers(each, rows, temperature, options) for each in (options.before, options.after)]
        found[name] = comparison = compare(*(scored(each, rows) for each in both))
        low, high = comparison.gain - comparison.half_width, comparison.gain + comparison.half_width
        print(f"{name:7} {comparison.before:.3f} -> {comparison.after:.3f}  ({low:+.3f} to {high:+.3f})")
        document[name] = asdict(comparison) | {"low": low, "high": high}
        for each, before, after in zip(said, *both, strict=True):
            each[name] = {"before": before, "after": after}
    document["answers"] = said[: options.answers]
    options.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Evaluate; return 0, or 2 after printing what was wrong."""
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    try:
        anyio.run(evaluate, options)
    except OppoError as error:
        print(f"evaluate: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
