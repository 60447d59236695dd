"""The modes as an earlier commit ran them: contestants from a checkout of it, in the same rounds as today's.

Its workers read a copy of the workload's directory, whose recipe has no field that the commit does not know.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from benchmarks.ladder.directory import Files
from benchmarks.ladder.rounds import EARLIER, Entry, Plan
from benchmarks.ladder.workloads import Layout
from benchmarks.revision import checkout
from oppo.errors import ConfigError

WORKERS: Final = (("benchmarks", "ladder"), ("oppo", "bench"))
"""Packages that have held the workers and the workloads; today's is the first one."""


@contextmanager
def earlier(
    revision: str | None, files: Files, modes: Sequence[str], layout: Layout, plan: Plan
) -> Iterator[list[Entry]]:
    """Yield the contestants ``mode@revision`` of a commit, whose checkout is removed afterwards; none without one.

    Raises:
        ConfigError: there is no such commit, or it cannot run the ladder, a mode or an option.
    """
    if revision is None:
        yield []
        return
    with TemporaryDirectory(prefix="oppo-against-") as folder, checkout(revision, Path(folder) / "source") as source:
        package = _package(source, revision)
        code = {file.stem: file.read_text(encoding="utf-8") for file in source.joinpath(*package).glob("*.py")}
        if missing := [mode for mode in modes if f'"{mode}"' not in code["modes"]]:
            raise ConfigError(f"commit {revision} has no mode {missing[0]}; choose --modes that both have")
        options = ["--layout", layout, "--device", plan.device, "--scorers", plan.scorers]
        if "--engine" in code["worker"]:
            options += ["--engine", plan.engine]
        elif plan.engine != "transformers":
            raise ConfigError(f"commit {revision} runs the ladder on transformers only, not on {plan.engine}")
        directory = _understood(files, code["workloads"], Path(folder) / "files", revision)
        program = (sys.executable, "-m", ".".join((*package, "worker")), str(directory), *options)
        yield [Entry(f"{mode}{EARLIER}{revision}", (*program, "--mode", mode), source=source) for mode in modes]


def _package(source: Path, revision: str) -> tuple[str, ...]:
    for package in WORKERS:
        if source.joinpath(*package, "worker.py").exists():
            return package
    raise ConfigError(f"commit {revision} has no ladder: {' or '.join('/'.join(each) for each in WORKERS)}")


def _understood(files: Files, workloads: str, directory: Path, revision: str) -> Path:
    """Return a directory with the models and prompts of ``files``, and the fields of its recipe that are known."""
    directory.mkdir()
    for path in files.directory.iterdir():
        (directory / path.name).symlink_to(path.resolve())
    spec = json.loads((files.directory / "spec.json").read_text(encoding="utf-8"))
    for name in [name for name in spec["recipe"] if f"    {name}: " not in workloads]:
        if spec["recipe"].pop(name):
            raise ConfigError(f"commit {revision} cannot run workload {files.workload.name}: it knows no {name}")
    (directory / "spec.json").unlink()
    (directory / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    return directory
