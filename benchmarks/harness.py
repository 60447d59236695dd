"""What benches share: turns, paired ratios, the facts of a machine, files of results, tables, the code of a commit."""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from benchmarks import CHECKOUT
from oppo.cli import call, note, program
from oppo.errors import ConfigError
from oppo.log import routed
from oppo.stages import ScoredRollout

Each = TypeVar("Each")

END: Final = "<!-- end -->"  # the line of a page that ends a part made by a bench


def kl_of(answer: ScoredRollout) -> float:
    """Return the sum of the log-ratios to the reference, in nats; NaN without one."""
    reference = answer.reference
    return float("nan") if reference is None else float((answer.finish.response.logprobs - reference).sum())


def command(run: Callable[..., int | None], arguments: Sequence[str] | None = None) -> int:
    """Run a function as ``python -m`` its module, its parameters as options; return an exit code of ``oppo``'s."""
    module, spec = run.__module__, sys.modules["__main__"].__spec__
    if module == "__main__" and spec is not None:  # a process of a place could not import it as that
        module, run = spec.name, getattr(importlib.import_module(spec.name), run.__name__)
    about = (run.__doc__ or "").partition("\n")[0]
    app = program(f"python -m {module.removesuffix('.__main__')}", about)
    app.default(run)
    with routed(note):
        return call(app, arguments)


def turns(contestants: Sequence[Each], rounds: int) -> Iterator[tuple[int, Each]]:
    """Yield every contestant once a round: first in round 0, a warm-up, then in rounds 1 to ``rounds``.

    A disturbance of the machine meets all contestants of a round. Even rounds go backwards, so that none always follows
    the same neighbour.

    Example:
        >>> list(turns("ab", 1))
        [(0, 'b'), (0, 'a'), (1, 'a'), (1, 'b')]
    """
    for number in range(rounds + 1):
        for each in contestants if number % 2 else reversed(contestants):
            yield number, each


@dataclass(frozen=True, slots=True)
class Spread:
    """A median with the least and the greatest value."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, low=1.0, high=3.0)
        """
        sample = sorted(values)
        return cls(float(np.median(sample)), sample[0], sample[-1])

    @classmethod
    def of_ratios(cls, values: Sequence[float], others: Sequence[float]) -> Spread:
        """Return the spread of ``value / other``, paired by round, so that a slow minute cancels."""
        return cls.of(value / other for value, other in zip(values, others, strict=True))

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} - {self.high:.2f})"


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts needed to compare figures with those of another machine."""

    cpu: str
    cores: int  # that this process may use
    memory_gb: float
    system: str
    device: str
    # mean number of runnable processes in the last minute: well above 1, other programs disturbed the figures
    load: float

    @classmethod
    def here(cls, device: str = "cpu") -> Machine:
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
        return cls(
            cpu=processor(),
            cores=len(cores_here()),
            memory_gb=round(pages / 1e9, 1),
            system=f"{platform.system()} {platform.machine()}",
            device=device if device == "cpu" else _gpu(device),
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        )


def _gpu(device: str) -> str:
    import torch  # noqa: PLC0415 - `--help` should be quick

    return torch.cuda.get_device_name(device)


def cores_here() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())


def versions(*distributions: str) -> dict[str, str]:
    found = {}
    for name in distributions:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed"
    return found


def keep(path: Path | None, results: object) -> None:
    if path is not None:
        path.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


def on_this_machine(results: Mapping[str, object]) -> dict[str, object]:
    return {"machine": asdict(Machine.here()), **results}


def require_writable(files: Mapping[str, Path | None]) -> None:
    """Check that files of results, by option, can be written; make their folders."""
    for option, file in files.items():
        if file is None:
            continue
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            before = file.exists()
            file.open("a").close()
            if not before:
                file.unlink()
        except OSError as error:
            raise ConfigError(
                f"{option}: {file} cannot be written, so nothing is measured: {error.strerror or error}; name a "
                "file in a folder that is yours"
            ) from error


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal: the first column to the left, the others to the right, a line below the head."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(head)} |", "|" + "---|" * len(head)]
    for row in rows:
        if len(row) != len(head):
            raise ValueError(f"a row of the table has {len(row)} columns, and its head {len(head)}: {row}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def placed(page: str, begin: str, content: str) -> str:
    """Return the page with ``content`` between the line ``begin`` and the next :data:`END`."""
    before, found, rest = page.partition(begin)
    _, end, after = rest.partition(END)
    if not found or not end:
        raise ValueError(f"the page has no {begin.strip()} with {END} after it, so the part has no place in it")
    return f"{before}{begin}{content}{end}{after}"


@contextmanager
def checkout(revision: str | None, folder: Path) -> Iterator[Path]:
    """Yield a folder that holds a commit; the working tree without one."""
    if revision is None:
        yield CHECKOUT
        return
    add = ["git", "worktree", "add", "--quiet", "--detach", str(folder), revision]
    made = subprocess.run(add, cwd=CHECKOUT, check=False, capture_output=True, text=True)
    if made.returncode != 0:
        raise ConfigError(f"commit {revision!r} cannot be checked out: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", str(folder)], cwd=CHECKOUT, check=True)
