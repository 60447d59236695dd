"""Train on GSM8K with PPO, and report strict and flexible accuracy before and after.

The two files of https://github.com/openai/grade-school-math, ``train.jsonl`` and ``test.jsonl``, become prompts, and
``config.toml`` is trained::

    python -m examples.gsm8k.learn train.jsonl test.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from oppo.cli import main as command
from oppo.config.load import load_settings
from oppo.errors import OppoError

HERE = Path(__file__).parent

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
"""What follows each question, in the run that this one repeats."""


def rows(file: Path) -> Iterator[dict[str, object]]:
    """Yield a published file's questions as chat messages, each with its answer: a number without commas.

    Raises:
        SystemExit: a line is none of these.
    """
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        try:
            row = json.loads(line)
            _, marked, answer = row["answer"].rpartition("#### ")
            prompt = [{"role": "user", "content": f"{row['question']} {INSTRUCTION}"}]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise SystemExit(f"{file}:{number}: expected question and answer, got {line[:80]!r} ({error!r})") from error
        if not marked:
            raise SystemExit(
                f"{file}:{number}: expected an answer that ends with '#### NUMBER', got {row['answer'][-40:]!r}"
            )
        yield {"prompt": prompt, "answer": answer.strip().replace(",", "")}


def prepare(train: Path, test: Path, folder: Path) -> tuple[Path, Path]:
    """Write prompts and held-out prompts into a folder, and return them."""
    folder.mkdir(parents=True, exist_ok=True)
    made = folder / "prompts.jsonl", folder / "held_out.jsonl"
    for source, target in zip((train, test), made, strict=True):
        target.write_text("".join(json.dumps(row) + "\n" for row in rows(source)), encoding="utf-8")
    return made


def accuracies(run: Path) -> Mapping[str, tuple[float, float]]:
    """Return strict and flexible accuracy on held-out questions, before the first update and after the last."""
    lines = [json.loads(line) for line in (run / "eval.jsonl").read_text(encoding="utf-8").splitlines()]
    names = ("strict", "flexible")
    return {name: (lines[0][f"eval/rewards/{name}/mean"], lines[-1][f"eval/rewards/{name}/mean"]) for name in names}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prepare, train and report; return the exit code of ``oppo train``."""
    parser = argparse.ArgumentParser(description="Train on GSM8K with PPO.")
    parser.add_argument("train", type=Path, help="train.jsonl of grade-school-math")
    parser.add_argument("test", type=Path, help="test.jsonl of it")
    parser.add_argument("--folder", type=Path, default=HERE / "data", help="for the prompts (default: %(default)s)")
    parser.add_argument("--config", type=Path, default=HERE / "config.toml")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help="another setting")
    options = parser.parse_args(arguments)
    prompts, held_out = prepare(options.train, options.test, options.folder)
    files = [f"data.prompts={prompts.absolute()}", f"eval.prompts={held_out.absolute()}"]
    chosen = [*files, *options.set]
    if code := command(["train", str(options.config), *(part for each in chosen for part in ("--set", each))]):
        return code
    try:
        run = load_settings(options.config, chosen).run_directory
    except OppoError as error:
        print(f"learn: {error}", file=sys.stderr)
        return 2
    for name, (before, after) in accuracies(run).items():
        print(f"{name}: {before:.4f} before, {after:.4f} after")
    return 0


if __name__ == "__main__":
    sys.exit(main())
