"""The peer as a contestant: its program and its fastest measured settings.

Its environment is ``.venv-peer`` of the checkout. A comparison against any cell but the peer's best would flatter us.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from pydantic import TypeAdapter, ValidationError

from benchmarks import CHECKOUT
from oppo.errors import ConfigError

PYTHON: Final = Path(".venv-peer/bin/python")
PROGRAM: Final = Path("benchmarks/peer/trl_ppo.py")
SWEEP: Final = Path("benchmarks/peer/sweep.json")


@dataclass(frozen=True, slots=True)
class Cell:
    """One setting of the peer.

    Attributes:
        rollout_batch: rows that generate and are scored at a time (TRL's ``local_rollout_forward_batch_size``).
        minibatches: forward and backward passes an epoch; the optimizer steps as often as the workload says.
        threads: intra-op threads.
    """

    rollout_batch: int
    minibatches: int
    threads: int

    def arguments(self) -> list[str]:
        """Return the program's arguments for the cell."""
        return [
            *("--rollout-batch", str(self.rollout_batch)),
            *("--minibatches", str(self.minibatches)),
            *("--threads", str(self.threads)),
        ]


@dataclass(frozen=True, slots=True)
class CellTimes:
    """Wall-clock seconds of each step in a cell; step k has the same prompts in every cell."""

    cell: Cell
    seconds_per_step: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Their sum."""
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
    """The committed sweep, by workload."""

    workloads: dict[str, Swept] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Sweep:
        """Return the sweep in a file; an empty one without the file.

        Raises:
            ConfigError: the file holds no sweep.
        """
        if not path.exists():
            return cls()
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except ValidationError as error:
            raise ConfigError(f"{path} is no sweep of a peer; delete it, and sweep again: {error}") from error

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_bytes(TypeAdapter(Sweep).dump_json(self, indent=2) + b"\n")


@dataclass(frozen=True, slots=True)
class Choice:
    """The cell to run the peer with, and its origin in a sentence."""

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
        untried = Cell(rollout_batch=spec["batch"], minibatches=spec["minibatches"], threads=cores)
        return Choice(untried, f"workload {name} was never swept for the peer: the whole batch at once, all cores")
    origin = f"the fastest of {len(swept.cells)} cells on {swept.machine} with {swept.cores} cores"
    if swept.fingerprint != fingerprint(directory):
        origin += f"; workload {name} has changed since: sweep again"
    if swept.best.threads > cores:
        origin += f"; with {cores} threads instead of {swept.best.threads}"
    return Choice(replace(swept.best, threads=min(swept.best.threads, cores)), origin)


def command(directory: Path, cell: Cell, checkout: Path = CHECKOUT) -> list[str]:
    """Return the command line that starts the peer on the workload in ``directory``.

    Raises:
        ConfigError: its environment is missing.
    """
    return [str(interpreter(checkout)), str(checkout / PROGRAM), str(directory), *cell.arguments()]


def interpreter(checkout: Path = CHECKOUT) -> Path:
    """Return the Python of the peer's environment.

    Raises:
        ConfigError: it is missing.
    """
    python = checkout / PYTHON
    if not python.exists():
        raise ConfigError(f"the peer has no environment at {python}: `make bench-peer` makes it")
    return python
