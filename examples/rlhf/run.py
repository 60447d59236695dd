"""Make every step from base model to aligned model, each a command: ``python -m examples.rlhf.run [--short]``.

It prints each command with its seconds, by the wall clock and of the processors, and ends at the first that fails.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
SHORT = ("--max_steps", "2", "--per_device_train_batch_size", "4")


def commands(base: Path, folder: Path, *, short: bool) -> Iterator[tuple[str, list[str]]]:
    """Yield the name and the command of each step, for the full or the short form."""
    here, module = Path(sys.executable).parent, [sys.executable, "-m"]
    yield "sample", [
        *module, "examples.rlhf.samples", "--base", str(base), "--output", str(folder / "data"),
        *(["--prompts", "8"] if short else []),
    ]  # fmt: skip
    for stage, command, data in (("sft", "sft", "sft"), ("reward", "reward", "pairs")):
        yield stage, [
            str(here / "trl"), command, "--config", str(HERE / f"{stage}.yaml"), "--model_name_or_path", str(base),
            "--dataset_name", str(folder / "data" / data), "--output_dir", str(folder / stage),
            *(SHORT if short else []),
        ]  # fmt: skip
    paths = {
        "run.directory": folder / "runs",
        "models.policy": base,
        "models.adapter": folder / "sft",
        "rewards.0.source": folder / "reward",
        "data.prompts": folder / "data" / "prompts.jsonl",
    }
    chosen = [f"{key}={json.dumps(str(path.absolute()))}" for key, path in paths.items()]
    chosen += ["run.steps=2", "step.batch=4", "step.overcommit=1"] if short else []
    yield "ppo", [str(here / "oppo"), "train", str(HERE / "ppo.toml"), *(part for e in chosen for part in ("--set", e))]
    count = ["--count", "8"] if short else []
    yield "evaluate", [*module, "examples.rlhf.evaluate", "--folder", str(folder), *count]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the commands; return 0, the code of the one that failed, or 2 if a run is there already."""
    parser = argparse.ArgumentParser(description="Make every step from base model to aligned model.")
    parser.add_argument("--base", type=Path, default=HERE.parent / "smollm2" / "model", help="(default: %(default)s)")
    parser.add_argument("--folder", type=Path, default=HERE, help="for all results (default: %(default)s)")
    parser.add_argument("--short", action="store_true", help="a few rows and two steps of each: does it run?")
    options = parser.parse_args(arguments)
    if (done := options.folder / "runs" / "ppo").exists():
        print(f"run: {done} is there already: remove it, or choose another --folder", file=sys.stderr)
        return 2
    seconds: dict[str, dict[str, float]] = {}
    for name, command in commands(options.base, options.folder, short=options.short):
        print("$", *command, flush=True)
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        code = subprocess.run(command, check=False).returncode  # noqa: S603 - no shell
        after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic() - start
        spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(f"{name}: {wall:.0f} s, {spent:.0f} s of the processors", flush=True)
        if code:
            return code
        seconds[name] = {"wall": round(wall, 1), "processors": round(spent, 1)}
    file = options.folder / "results.json"
    document = json.loads(file.read_text(encoding="utf-8")) | {"seconds": seconds}
    file.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
