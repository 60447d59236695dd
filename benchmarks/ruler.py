"""``python -m benchmarks.ruler OLD [NEW]``: whether two commits train the same, to the last bit, on this machine.

Each commit makes the same deterministic runs through ``oppo train`` and ``oppo resume``: every algorithm, adapters, a
shared trunk, corrections for stale tokens, truncated sampling, deferral, resumption, scorers in a process. Their
trained tensors, the text and scores of every rollout, the journals, and all metrics but times must be equal. NEW is the
working tree unless given. ``RENAMED`` has the present names of renamed keys, ``ADDED`` the settings under which today's
code does what it did before it had them; each commit's ``docs/settings.md`` decides what applies to it. Metrics are
compared by their names of today; one that only NEW has is no difference.

Prints a line for each run, and ends with exit code 1 if one differs.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file

from benchmarks.harness import checkout, command
from benchmarks.ladder.workloads import chosen
from oppo.cli import DONE, FAILED
from oppo.report.metrics import metrics_of
from oppo.report.records import read
from tests.workplace import furnish

# Short responses of different lengths, three rollouts more in flight than are trained, several micro-batches
DETERMINISTIC: Final = {
    "run.exact": "true",
    "run.cores": "1",
    "run.panel": '"off"',
    "run.steps": "5",
    "run.checkpoint_every": "2",
    "run.keep_last": "9",
    "run.samples": "1000",
    "run.scorers": '"thread"',
    "models.policy": '"actor"',
    "models.reward": '"reward"',
    "data.prompts": '"prompts.jsonl"',
    "sampling.max_new_tokens": "24",
    "sampling.stop": "[2, 8, 15, 23, 37, 51, 66, 80]",
    "step.batch": "4",
    "step.extra": "3",
    "step.chunk": "3",
    "trainer.epochs": "2",
    "trainer.minibatches": "2",
    "trainer.learning_rate": "1e-3",
    "trainer.micro_batch_tokens": "64",
}

GROUPS: Final = {"step.samples": "3", "step.batch": "2", "step.extra": "2"}

# The changes of each run; a key without a value is left out
RUNS: Final[Mapping[str, Mapping[str, str]]] = {
    "ppo": {},
    "ppo-kept": {"step.on_publish": '"keep"'},
    "ppo-waiting": {"step.extra": "0", "step.chunk": '"whole"'},
    "ppo-shaped": {
        "step.whiten_rewards": "true",
        "step.score_norm": "true",
        "step.kl_target": "0.5",
        "step.kl_horizon": "50",
    },
    "ppo-function": {"models.reward": '"reward.py:short"'},
    "ppo-process": {"run.scorers": '"process"'},
    "tail-batched": {"step.admission": '"tail-batched"', "step.extra": ""},
    "grpo": {"step.algorithm": '"grpo"', **GROUPS},
    "rloo": {"step.algorithm": '"rloo"', **GROUPS},
    "lora": {"models.lora_rank": "4"},
    "shared-trunk": {"models.shared_trunk": "true"},
    "truncated": {"sampling.top_k": "20", "sampling.top_p": "0.9", "sampling.min_new_tokens": "2"},
    "proximal": {"step.denominator": '"proximal"', "step.weight": '"truncated"'},
    "masked": {"step.weight": '"mask_sequence"', "step.weight_low": "0.99"},
    "kl-in-loss": {"step.kl_in": '"loss"', "step.kl_estimator": '"k3"', "trainer.entropy_coefficient": "0.01"},
}

# Made a second time, and resumed from the checkpoint of their second step
RESUMED: Final = ("ppo", "grpo", "lora", "shared-trunk", "proximal")
RESUMED_SUFFIX: Final = "-resumed"

# Names of keys today, by those above. `models.reward` needs none: today's code reads it as an earlier version's
RENAMED: Final[Mapping[str, str]] = {
    "run.exact": "run.deterministic",
    "run.samples": "run.logged_samples",
    "step.extra": "step.overcommit",
    "step.on_publish": "step.kv_on_sync",
    "step.samples": "algorithm.samples",
    "step.whiten_rewards": "algorithm.whiten_rewards",
    "step.score_norm": "algorithm.score_norm",
    "step.kl_target": "algorithm.kl_target",
    "step.kl_horizon": "algorithm.kl_horizon",
    "step.kl_in": "algorithm.kl_in",
    "step.kl_estimator": "algorithm.kl_estimator",
    "step.denominator": "algorithm.ratio_base",
    "step.weight": "algorithm.is_correction",
    "step.weight_low": "algorithm.is_low",
    "trainer.entropy_coefficient": "algorithm.entropy_coefficient",
}

# Keys whose default is not what commits did that do not know them, and the value that is
ADDED: Final[Mapping[str, str]] = {"algorithm.aggregation": '"tokens"'}

TIMED_KEYS: Final = ("at", "seen")  # keys of a journal's record that depend on time

# Prefixes of metrics that depend on time or the machine
TIMES: Final = (
    "seconds", "timing_s/", "throughput/", "overlap/", "queue/", "bottleneck/", "loop/", "memory/", "perf/",
    "admission/",
)  # fmt: skip

# The program that runs each commit in an interpreter of its own
SIDE: Final = """
import json, sys
from oppo.cli import main
for arguments in json.load(sys.stdin):
    if (code := main(arguments)) != 0:
        sys.exit(f"oppo {' '.join(arguments)}: exit code {code}")
"""


@dataclass(frozen=True, slots=True)
class Made:
    """The results of a run that do not depend on timing."""

    tensors: Mapping[str, torch.Tensor]
    records: Mapping[str, list[str]] = field(default_factory=dict)

    @classmethod
    def read(cls, run: Path) -> Made:
        final = run / "checkpoints" / "final"
        tensors = {
            f"{path.relative_to(final)}:{name}": tensor
            for path in sorted(final.rglob("*.safetensors"))
            for name, tensor in load_file(path).items()
        }
        if not tensors:
            raise SystemExit(f"{final} holds no tensors: the run has not ended")
        return cls(
            tensors,
            {
                "samples": sorted(_lines(read(run / "samples.jsonl"))),
                "journal": sorted(_lines(read(run / "journal.jsonl"))),
                "metrics": list(_lines(metrics_of(run))),
            },
        )

    def differs(self, other: Made) -> str:
        """Return the first difference to another run; empty without one."""
        if self.tensors.keys() != other.tensors.keys():
            return f"tensors: {sorted(self.tensors.keys() ^ other.tensors.keys())[:3]} are in one only"
        for name, tensor in self.tensors.items():
            if not torch.equal(tensor, other.tensors[name]):
                return f"tensor {name} by up to {(tensor.float() - other.tensors[name].float()).abs().max():.3g}"
        for kind, mine in self.records.items():
            theirs = other.records[kind]
            for before, after in zip(mine, theirs, strict=False):
                if before != after and (kind != "metrics" or _changed(before, after) != "{}"):
                    return f"{kind}: {_changed(before, after)} is now {_changed(after, before)}"
            if len(mine) != len(theirs):
                return f"{kind}: {len(mine)} lines are now {len(theirs)}"
        return ""


def _changed(record: str, other: str) -> str:
    there = json.loads(other)
    return json.dumps({key: value for key, value in json.loads(record).items() if there.get(key, ...) != value})[:300]


def _lines(records: Iterable[Mapping[str, object]]) -> Iterator[str]:
    for record in records:
        kept = {key: value for key, value in record.items() if key not in TIMED_KEYS and not key.startswith(TIMES)}
        yield json.dumps(kept, sort_keys=True)


def make_runs(source: Path, workplace: Path, runs: Sequence[str]) -> dict[str, Made]:
    known = (source / "docs" / "settings.md").read_text(encoding="utf-8")
    directory = workplace / "runs"
    again = {f"{name}{RESUMED_SUFFIX}": RUNS[name] for name in runs if name in RESUMED}
    every = {name: RUNS[name] for name in runs} | again
    for name, changes in every.items():
        settings = {**DETERMINISTIC, **changes, "run.directory": f'"{directory}"', "run.name": f'"{name}"'}
        spelled = {_spelled(key, known): value for key, value in settings.items() if value}
        document = _document(spelled | {key: value for key, value in ADDED.items() if _knows(known, key)})
        (workplace / f"{name}.toml").write_text(document, encoding="utf-8")
    _oppo(source, [["train", str(workplace / f"{name}.toml")] for name in every])
    for name in again:
        (directory / name / "summary.json").unlink()  # as if it had been killed before its end
        for later in ("final", "step-000004", "step-000005"):
            shutil.rmtree(directory / name / "checkpoints" / later)
    _oppo(source, [["resume", str(directory / name)] for name in again])
    return {name: Made.read(directory / name) for name in every}


def _document(settings: Mapping[str, str]) -> str:
    lines = {section: f"[{section}]" for section in sorted({key.split(".")[0] for key in settings})}
    for key, value in settings.items():
        section, name = key.split(".")
        lines[section] += f"\n{name} = {value}"
    return "\n\n".join(lines.values()) + "\n"


def _spelled(key: str, known: str) -> str:
    return key if _knows(known, key) else RENAMED.get(key, key)


def _knows(known: str, key: str) -> bool:
    section, name = key.split(".")
    part = known.partition(f"## `[{section}]`")[2].partition("\n## ")[0]
    return f"| `{name}` |" in part


def _oppo(source: Path, commands: Sequence[Sequence[str]]) -> None:
    environment = {**os.environ, "PYTHONPATH": str(source), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    made = subprocess.run(
        [sys.executable, "-c", SIDE], cwd=source, env=environment, input=json.dumps(commands), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False,
    )  # fmt: skip
    if made.returncode != 0:
        raise SystemExit(f"in {source}:\n{made.stdout[-3000:]}")


def compare(old: str, new: str | None = None, /, *, runs: str = ",".join(RUNS)) -> int:
    """Make the same deterministic runs with the code of two commits, and print what differs.

    Args:
        old: a commit.
        new: another; the working tree unless given.
        runs: which runs, by name, with commas between them.
    """
    names = chosen("run", runs, RUNS, tuple(RUNS))
    with tempfile.TemporaryDirectory() as folder:
        made = []
        for side, revision in (("old", old), ("new", new)):
            workplace = Path(folder) / side
            workplace.mkdir()
            furnish(workplace)
            with checkout(revision, Path(folder) / f"{side}-source") as source:
                made.append(make_runs(source, workplace, names))
    before, after = made
    different = {name: before[name].differs(after[name]) for name in before}
    for name, message in different.items():
        print(f"{name}: {message or 'the same'}")
    return FAILED if any(different.values()) else DONE


def main(arguments: Sequence[str] | None = None) -> int:
    return command("benchmarks.ruler", "Whether two commits train the same, to the last bit.", compare, arguments)


if __name__ == "__main__":
    sys.exit(main())
