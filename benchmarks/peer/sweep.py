"""The peers, and the settings under which each is fastest: ``python -m benchmarks.peer.sweep WORKLOAD_DIR...``.

For each number of threads it tries rollout batches and numbers of passes, in turn until neither finds a faster cell;
then, at the best of all cells, the peer's own options, one by one. Every cell is a process of its own and makes the
same first steps of the workload, without warm-up: a first step costs extra in every cell alike. A comparison against
any cell but the peer's best would flatter us.

A peer's environment is ``.venv-NAME`` of the checkout.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import Annotated, Final, TypeAlias, cast

from cyclopts import Parameter
from pydantic import TypeAdapter, ValidationError

from benchmarks import CHECKOUT
from benchmarks.harness import command, cores_here, processor
from benchmarks.ladder.contestant import Contestant
from benchmarks.peer.service import Spec, read_spec
from oppo.errors import ConfigError

SWEEP: Final = Path("benchmarks/peer/sweep.json")


@dataclass(frozen=True, slots=True)
class Cell:
    # rows that generate and are scored at a time (TRL's `local_rollout_forward_batch_size` for PPO,
    # `generation_batch_size` for GRPO)
    rollout_batch: int
    minibatches: int  # forward and backward passes an epoch; the optimizer steps as often as the workload says
    threads: int  # intra-op threads
    options: tuple[str, ...] = ()  # the peer's own, which are not its defaults

    def rows(self, spec: Spec) -> int:
        return spec.batch // self.minibatches

    def arguments(self) -> list[str]:
        return [
            *("--rollout-batch", str(self.rollout_batch)),
            *("--minibatches", str(self.minibatches)),
            *("--threads", str(self.threads)),
            *self.options,
        ]


@dataclass(frozen=True, slots=True)
class Peer:
    """A program that trains workloads as the ladder does."""

    name: str
    program: Path  # within the checkout
    by_groups: bool  # it compares the responses to a prompt, by GRPO; otherwise it trains by PPO
    options: tuple[tuple[str, ...], ...] = ()  # arguments of its own that a sweep tries

    def interpreter(self, checkout: Path = CHECKOUT) -> Path:
        python = checkout / f".venv-{self.name}" / "bin" / "python"
        if self.by_groups and not python.exists() and find_spec("trl"):  # as on a machine that is lent
            return Path(sys.executable)
        if not python.exists():
            raise ConfigError(
                f"the peer has no environment at {python.parent}: `make bench-peer PEER={self.name}` makes it"
            )
        return python

    def fitted(self, spec: Spec, cells: Sequence[Cell]) -> list[Cell]:
        """Return the cells that the peer can run: GRPO rolls out whole groups, and a pass divides its rollouts."""
        if not self.by_groups:
            return list(cells)
        whole = [cell for cell in cells if cell.rollout_batch % spec.samples == 0]
        return [replace(each, minibatches=spec.batch // divisor(each.rollout_batch, each.rows(spec))) for each in whole]


# By name
PEERS: Final = MappingProxyType(
    {
        peer.name: peer
        for peer in (
            Peer("trl", Path("benchmarks/peer/trl_ppo.py"), by_groups=False),
            Peer(
                "trl-grpo",
                Path("benchmarks/peer/trl_grpo.py"),
                by_groups=True,
                options=(("--attention", "eager"), ("--cache", "static")),
            ),
        )
    }
)


def peer_of(spec: Spec) -> Peer:
    return next(peer for peer in PEERS.values() if peer.by_groups == bool(spec.samples))


@dataclass(frozen=True, slots=True)
class CellTimes:
    """Wall-clock seconds of each step in a cell; step k has the same prompts in every cell."""

    cell: Cell
    seconds_per_step: tuple[float, ...]

    @property
    def seconds(self) -> float:
        return sum(self.seconds_per_step)


@dataclass(frozen=True, slots=True)
class Swept:
    """Every cell that was measured for one version of a workload, and the fastest."""

    fingerprint: str
    machine: str
    cores: int
    versions: Mapping[str, str]
    cells: tuple[CellTimes, ...]
    best: Cell


@dataclass(frozen=True, slots=True)
class Sweep:
    workloads: dict[str, Swept] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Return the sweep in a file; an empty one without the file."""
        if not path.exists():
            return cls()
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError(f"{path} is no sweep of a peer; delete it, and sweep again: {error}") from error

    def write(self, path: Path) -> None:
        path.write_bytes(TypeAdapter(Sweep).dump_json(self, indent=2) + b"\n")


@dataclass(frozen=True, slots=True)
class Choice:
    """The cell to run the peer with, and its origin in a message."""

    cell: Cell
    origin: str


def fingerprint(directory: Path) -> str:
    """Return 12 hexadecimal digits that change with the peer's work: models, prompts, its keys of ``spec.json``.

    They do not change with settings of ours alone, such as the chunk size, nor with measurements of the models.
    """
    spec = json.loads((directory / "spec.json").read_text(encoding="utf-8"))
    models = spec.pop("recipe", {}).get("models")
    spec.pop("measured", None)
    digest = hashlib.sha256(json.dumps([spec, models], sort_keys=True).encode())
    digest.update((directory / "prompts.jsonl").read_bytes())
    return digest.hexdigest()[:12]


def choose(sweep: Sweep, directory: Path, cores: int) -> Choice:
    """Return the fastest cell for the workload in ``directory``, on at most ``cores`` threads."""
    spec = json.loads((directory / "spec.json").read_text(encoding="utf-8"))
    name = spec["workload"]
    swept = sweep.workloads.get(name)
    if swept is None:
        rows = spec.get("samples", 0) or spec["batch"]
        untried = Cell(rollout_batch=rows, minibatches=max(spec["minibatches"], spec["batch"] // rows), threads=cores)
        return Choice(untried, f"workload {name} was never swept for the peer: {rows} rows at once, all cores")
    origin = f"the fastest of {len(swept.cells)} cells on {swept.machine} with {swept.cores} cores"
    if swept.fingerprint != fingerprint(directory):
        origin += f"; workload {name} has changed since: sweep again"
    if swept.best.threads > cores:
        origin += f"; with {cores} threads instead of {swept.best.threads}"
    return Choice(replace(swept.best, threads=min(swept.best.threads, cores)), origin)


def command_line(peer: Peer, directory: Path, cell: Cell, checkout: Path = CHECKOUT) -> list[str]:
    return [str(peer.interpreter(checkout)), str(checkout / peer.program), str(directory), *cell.arguments()]


# The smallest rollout batch tried, and the smallest batch of a pass, is the whole divided by this
SMALLEST_SHARE: Final = 8


# Returns a contestant's versions, and the seconds of its steps
Measure: TypeAlias = Callable[[Cell], tuple[Mapping[str, str], tuple[float, ...]]]


def halves(whole: int) -> Iterator[int]:
    """Yield ``whole``, a half, a quarter, ... down to the smallest share, as long as they are whole numbers."""
    part = 1
    while part <= min(SMALLEST_SHARE, whole) and whole % part == 0:
        yield whole // part
        part *= 2


def divisor(whole: int, most: int) -> int:
    return max(part for part in range(1, most + 1) if whole % part == 0)


def thread_counts(cores: int) -> list[int]:
    """Return 1, 2, 4, ... and the number of cores."""
    return sorted({2**k for k in range(cores.bit_length())} | {cores})


def sweep(peer: Peer, spec: Spec, cores: int, measure: Measure) -> tuple[Mapping[str, str], list[CellTimes]]:
    cells: list[CellTimes] = []
    versions: Mapping[str, str] = {}

    def best_of(candidates: Sequence[Cell]) -> Cell:
        nonlocal versions
        tried = {each.cell: each for each in cells}
        for cell in candidates:
            if cell not in tried:
                versions, seconds = measure(cell)
                tried[cell] = CellTimes(cell, seconds)
                cells.append(tried[cell])
        return min(candidates, key=lambda cell: tried[cell].seconds)

    rollouts = [*halves(spec.batch), *([spec.samples] if peer.by_groups else [])]
    bests = []
    for threads in thread_counts(cores):
        best, before = Cell(rollout_batch=spec.batch, minibatches=spec.minibatches, threads=threads), None
        while best != before:
            before = best
            best = best_of(peer.fitted(spec, [replace(best, rollout_batch=rows) for rows in rollouts]))
            whole = best.rollout_batch if peer.by_groups else spec.batch // spec.minibatches
            passes = [spec.batch // rows for rows in halves(whole)]
            best = best_of(peer.fitted(spec, [replace(best, minibatches=each) for each in passes]))
        bests.append(best)
    best = best_of(bests)
    best_of([best, *(replace(best, options=options) for options in peer.options)])
    return versions, cells


def swept(directory: Path, steps: int, checkout: Path = CHECKOUT) -> Swept:
    """Return every cell measured for the workload in ``directory``; report each on standard error."""
    spec, cores = read_spec(directory), len(cores_here())
    peer = peer_of(spec)

    def measure(cell: Cell) -> tuple[Mapping[str, str], tuple[float, ...]]:
        program = command_line(peer, directory, cell, checkout)
        with (
            TemporaryDirectory(prefix="oppo-sweep-") as logs,
            Contestant("peer", program, log=Path(logs) / "log") as running,
        ):
            versions = cast("Mapping[str, str]", running.ready()["versions"])
            seconds = tuple(step.seconds for step in running.run(steps))
        shown = "  ".join(f"{each:.2f}" for each in seconds)
        print(f"{spec.workload}  {cell}: {shown} s", file=sys.stderr, flush=True)
        return versions, seconds

    versions, cells = sweep(peer, spec, cores, measure)
    best = min(cells, key=lambda each: each.seconds).cell
    print(f"{spec.workload}: the fastest is {best}", file=sys.stderr)
    return Swept(fingerprint(directory), processor(), cores, versions, tuple(cells), best)


def sweep_all(
    workloads: Annotated[list[Path], Parameter(negative=())], /, *, steps: int = 2, json: Path = CHECKOUT / SWEEP
) -> None:
    """Sweep the named workloads, and replace their entries in the file.

    Args:
        workloads: directories of workloads.
        steps: PPO steps in each cell.
        json: the file to bring up to date.
    """
    for directory in workloads:
        found = Sweep.read(json)
        found.workloads[read_spec(directory).workload] = swept(directory, steps)
        found.write(json)


if __name__ == "__main__":
    sys.exit(command(sweep_all))
