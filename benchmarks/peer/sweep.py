"""Finds the settings under which the peer is fastest: ``python -m benchmarks.peer.sweep WORKLOAD_DIR...``.

For each number of threads: first the rollout batch, at one pass per optimizer step; then, at the best of those, the
number of passes. Rollouts do not depend on the passes, nor the update on the rollout batch, so this finds the optimum
of the whole grid. Every cell is a process of its own and makes the same first steps of the workload, without warm-up: a
first step costs extra in every cell alike.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, TypeAlias

from benchmarks import CHECKOUT
from benchmarks.machine import cores_here, processor
from benchmarks.peer.cells import SWEEP, Cell, CellTimes, Sweep, Swept, command, fingerprint
from benchmarks.peer.workload import Spec, read_spec

SMALLEST_SHARE: Final = 8
"""The smallest rollout batch tried, and the smallest batch of a pass, is the whole divided by this."""


@dataclass(frozen=True, slots=True)
class Report:
    """A contestant's versions, and the seconds of its steps."""

    versions: Mapping[str, str]
    seconds_per_step: tuple[float, ...]


Measure: TypeAlias = Callable[[Cell], Report]


def halves(whole: int) -> Iterator[int]:
    """Yield ``whole``, a half, a quarter, ... down to the smallest share, as long as they are whole numbers."""
    part = 1
    while part <= min(SMALLEST_SHARE, whole) and whole % part == 0:
        yield whole // part
        part *= 2


def thread_counts(cores: int) -> list[int]:
    """Return 1, 2, 4, ... and the number of cores."""
    return sorted({2**k for k in range(cores.bit_length())} | {cores})


def sweep(spec: Spec, cores: int, measure: Measure) -> tuple[Mapping[str, str], list[CellTimes]]:
    """Return the peer's versions and every cell tried, in order."""
    cells: list[CellTimes] = []
    versions: Mapping[str, str] = {}

    def best_of(candidates: Sequence[Cell]) -> Cell:
        nonlocal versions
        tried = {each.cell: each for each in cells}
        for cell in candidates:
            if cell not in tried:
                report = measure(cell)
                versions = report.versions
                tried[cell] = CellTimes(cell, report.seconds_per_step)
                cells.append(tried[cell])
        return min(candidates, key=lambda cell: tried[cell].seconds)

    for threads in thread_counts(cores):
        whole = Cell(rollout_batch=spec.batch, minibatches=spec.minibatches, threads=threads)
        best = best_of([replace(whole, rollout_batch=rows) for rows in halves(spec.batch)])
        passes = [spec.batch // rows for rows in halves(spec.batch // spec.minibatches)]
        best_of([replace(best, minibatches=each) for each in passes])
    return versions, cells


def run(program: Sequence[str], steps: int) -> Report:
    """Return a contestant's report on one request for ``steps`` steps.

    Raises:
        RuntimeError: it died, or its work is not the workload's.
    """
    request = json.dumps({"run": steps}) + "\n"
    done = subprocess.run(program, input=request, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode or len(lines) != 2:
        tail = "\n".join(done.stderr.splitlines()[-20:])
        raise RuntimeError(f"{' '.join(program)} ended with {done.returncode} after {len(lines)} of 2 lines:\n{tail}")
    ready, answer = lines
    if "error" in answer:
        raise RuntimeError(f"{' '.join(program)} {answer['error']}")
    return Report(ready["ready"]["versions"], tuple(step["seconds"] for step in answer["steps"]))


def swept(directory: Path, steps: int, checkout: Path = CHECKOUT) -> Swept:
    """Return every cell measured for the workload in ``directory``; report each on standard error."""
    spec, cores = read_spec(directory), len(cores_here())

    def measure(cell: Cell) -> Report:
        report = run(command(directory, cell, checkout), steps)
        seconds = "  ".join(f"{each:.2f}" for each in report.seconds_per_step)
        print(f"{spec.workload}  {cell}: {seconds} s", file=sys.stderr, flush=True)
        return report

    versions, cells = sweep(spec, cores, measure)
    best = min(cells, key=lambda each: each.seconds).cell
    print(f"{spec.workload}: the fastest is {best}", file=sys.stderr)
    return Swept(fingerprint(directory), processor(), cores, versions, tuple(cells), best)


def main() -> None:
    """Sweep the named workloads, and replace their entries in the file."""
    parser = argparse.ArgumentParser(description="Finds the settings under which the peer is fastest")
    parser.add_argument("workloads", type=Path, nargs="+", help="directories of workloads")
    parser.add_argument("--steps", type=int, default=2, help="PPO steps in each cell")
    parser.add_argument("--json", type=Path, default=CHECKOUT / SWEEP, help="the file to bring up to date")
    given = parser.parse_args()
    for directory in given.workloads:
        found = Sweep.read(given.json)
        found.workloads[read_spec(directory).workload] = swept(directory, given.steps)
        found.write(given.json)


if __name__ == "__main__":
    main()
