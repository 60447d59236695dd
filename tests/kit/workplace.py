"""A folder in which ``oppo train`` can be run: tiny models made on the spot, a reward function, prompts, settings."""

from __future__ import annotations

import json
import os
import signal
import tomllib
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors.numpy import load_file
from tokenizers import Tokenizer as Words, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from oppo.cli import main
from oppo.report.metrics import in_own_names, metrics_of
from oppo.run.train import FINAL
from tests.hf import tiny
from tests.kit.forked import Program

CONFIG = """
[run]
name = "first"
steps = 2
cores = 1
panel = "lines"
[models]
policy = "actor"
[[rewards]]
source = "reward"
[data]
prompts = "prompts.jsonl"
[sampling]
max_new_tokens = 12
[step]
batch = 4
overcommit = 2
chunk = 4
[trainer]
learning_rate = 1e-3
epochs = 1
"""

REWARDS = """
import os, signal, sys, time

def short(prompts, completions, goal):
    return [-len(c.split()) / 10 for c in completions]

def odd(prompts, completions):
    return [float(len(c.split()) % 2) for c in completions]

def broken(prompts, completions):
    return [None for _ in completions]

seen = []

def tiring(prompts, completions):
    seen.extend(completions)
    return [1.0 if len(seen) <= 4 else None for _ in completions]

def pressing(prompts, completions):
    if not seen:
        os.kill(os.getpid(), signal.SIGINT)
    seen.extend(completions)
    return [0.0 for _ in completions]

counted = []

def late(prompts, completions):
    if "ENDED_AT" not in os.environ:
        counted.clear()
    else:
        before = len(counted)
        counted.extend(completions)
        if before < int(os.environ["ENDED_AT"]) <= len(counted):
            os.kill(os.getpid(), signal.SIGTERM)
    return [-len(c.split()) / 10 for c in completions]

def picky(prompts, completions, goal):
    return [float("nan") if g % 3 == 0 else 1.0 for g in goal]

def slow(prompts, completions):
    time.sleep(0.7)
    return [0.0 for _ in completions]

def stuck(prompts, completions):
    time.sleep(3600)

def leaky(prompts, completions):
    raise OSError(f"401 for https://me:{os.environ['JUDGE_PASSWORD']}@judge.example/?api_key=canary-in-query")

def rude(prompts, completions):
    raise ValueError("\\x1b]0;owned\\x07\\x1b[31m[bold]<script>alert(1)</script>")
"""


def tokenizer(*, shifted: bool = False, size: int = tiny.VOCABULARY) -> PreTrainedTokenizerFast:
    """Return one of words ``w3``, ``w4``, ...; a shifted one knows other words."""
    names = ["<pad>", "<s>", "</s>", *(f"w{i + shifted}" for i in range(3, size))]
    return tokenizer_of(names)


def tokenizer_of(names: list[str]) -> PreTrainedTokenizerFast:
    """Return one that knows these words; the first three are padding, beginning and end."""
    words = Words(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        pad_token=names[0],
        bos_token=names[1],
        eos_token=names[2],
        clean_up_tokenization_spaces=False,
    )


def furnish(folder: Path) -> Path:
    """Fill a folder with everything a run needs, and return it."""
    tiny.causal("llama", seed=1).save_pretrained(folder / "actor")
    tiny.scalar("llama", seed=2).save_pretrained(folder / "reward")
    for name in ("actor", "reward"):
        tokenizer().save_pretrained(folder / name)
    rows = [{"prompt": " ".join(f"w{3 + (7 * i + k) % 90}" for k in range(2 + i % 5)), "goal": i} for i in range(20)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARDS)
    (folder / "config.toml").write_text(CONFIG)
    return folder


def oppo(folder: Path, command: str = "", *overrides: str) -> int:
    """Run ``oppo train`` in this process and return its exit code."""
    code = main(["train", str(folder / "config.toml"), *command.split(), *_set(overrides)])
    require_bounded_staleness(_directory(folder, overrides))
    return code


def resume(folder: Path, name: str, *overrides: str) -> int:
    """Run ``oppo resume`` in this process and return its exit code."""
    code = main(["resume", str(folder / "runs" / name), *_set(overrides)])
    require_bounded_staleness(folder / "runs" / name)
    return code


class Training(Program):
    """``oppo train`` in a process of its own."""

    def __init__(self, folder: Path, overrides: tuple[str, ...], before: str, environment: dict[str, str]) -> None:
        program = f"import sys\n{before}\nfrom oppo.cli import main\nsys.exit(main())"
        super().__init__(program, ["train", str(folder / "config.toml"), *_set(overrides)], environment)
        self._directory = _directory(folder, overrides)

    def children(self) -> list[int]:
        """Return the processes of the run once it has made two steps."""
        assert self.stdout.readline()
        assert self.stdout.readline()
        return [int(each) for each in Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split()]

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        if error is None:
            require_bounded_staleness(self._directory)


def start(folder: Path, *overrides: str, before: str = "", **environment: str) -> Training:
    """Start ``oppo train`` in a process of its own.

    Args:
        folder: the workplace.
        overrides: settings.
        before: Python that the process runs first.
        environment: further variables.
    """
    return Training(folder, overrides, before, environment)


def killed_and_replaced(process: Training, replica: int, folder: Path, run_name: str) -> str:
    """Kill one of two replicas of a run's policy, interrupt the run once there are two again; return what it said."""
    os.kill(replica, signal.SIGKILL)
    members = [2.0]
    while members[-1] == 1 or 1 not in members:
        assert process.stdout.readline()
        members += [each["sync/members"] for each in records(folder, run_name, "metrics.jsonl")[-1:]]
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=120)
    assert "has been started again, with version" in said
    return said


def require_bounded_staleness(run: Path) -> None:
    """Check that no step of a run trained a token that is older than deferral and lookahead allow."""
    if not (run / "metrics.jsonl").exists():
        return
    step = tomllib.loads((run / "config.toml").read_text(encoding="utf-8"))["step"]
    deferrals = 0 if step["admission"] == "tail-batched" else step["max_deferrals"]
    for line in metrics_of(run):
        staleness = line.get("staleness/max", 0.0)
        assert staleness is not None
        assert staleness <= deferrals + step["lookahead"], f"{run.name}, step {line['step']}: {staleness} updates stale"


def _directory(folder: Path, overrides: tuple[str, ...]) -> Path:
    names = [value for key, _, value in (override.partition("=") for override in overrides) if key == "run.name"]
    return folder / "runs" / (names or ["first"])[-1]


def run(folder: Path, *overrides: str, before: str = "", **environment: str) -> tuple[int, str, str]:
    """Run ``oppo train`` in a process of its own; return its exit code and what it said on either stream."""
    with start(folder, *overrides, before=before, **environment) as process:
        out, said = process.communicate(timeout=240)
        return process.wait(), out, said


def records(folder: Path, run_name: str, file: str) -> list[dict[str, Any]]:
    """Return the lines of a file of a run directory, metrics by oppo's names; JSON, so their values are of any type."""
    lines = read_lines(folder / "runs" / run_name / file)
    return [in_own_names(line) for line in lines] if file == "metrics.jsonl" else lines


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Return the objects of a file's whole lines: its run may be writing the last."""
    return [json.loads(line) for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def rewritten(file: Path, text: str) -> Path:
    """Write a text to a new file in place of the one there is: to cut that, a file system may wait for the disk."""
    file.unlink(missing_ok=True)
    file.write_text(text)
    return file


def weights(folder: Path, run_name: str) -> dict[str, bytes]:
    """Return every tensor of the models that a run trained, under ``actor/...`` and ``critic/...``."""
    files = sorted((folder / "runs" / run_name / FINAL).glob("*/model.safetensors"))
    assert files, run_name
    return {f"{file.parent.name}/{key}": each.tobytes() for file in files for key, each in load_file(file).items()}


def _set(overrides: tuple[str, ...]) -> list[str]:
    return [each for override in overrides for each in ("--set", override)]
