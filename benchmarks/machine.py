"""The machine that figures were measured on."""

from __future__ import annotations

import os
import platform
import resource
from dataclasses import dataclass
from pathlib import Path

import torch

from benchmarks.ladder.layout import cores_here


@dataclass(frozen=True, slots=True)
class Machine:
    """What a reader needs to compare figures with those of another machine.

    Attributes:
        cores: those that this process may use.
        load: mean number of processes that wanted to run in the last minute, before anything was measured or after:
            much more than one says that the machine had other things to do.
    """

    cpu: str
    cores: int
    memory_gb: float
    system: str
    device: str
    load: float

    @classmethod
    def here(cls, device: str) -> Machine:
        """Return the machine that this runs on."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
        return cls(
            cpu=_cpu(),
            cores=len(cores_here()),
            memory_gb=round(pages / 1e9, 1),
            system=f"{platform.system()} {platform.machine()}",
            device=device if device == "cpu" else torch.cuda.get_device_name(device),
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        )


def peak_rss_mb() -> float:
    """Return the most memory that this process and each of its children have held, added up, in MB of 2**20 bytes.

    Not from ``getrusage`` where that can be avoided: there a process begins with the peak of the one that started it.
    """
    processes = Path("/proc/self").exists()
    if not processes:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    children = [pid for told in Path("/proc/self/task").glob("*/children") for pid in told.read_text().split()]
    return sum(_peak_kb(Path("/proc") / pid) for pid in ("self", *children)) / 1024


def _peak_kb(process: Path) -> int:
    try:
        status = (process / "status").read_text(encoding="utf-8")
    except OSError:  # it has ended meanwhile
        return 0
    return next((int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM:")), 0)


def _cpu() -> str:
    """Return the processor's name, as far as the system tells."""
    told = Path("/proc/cpuinfo")
    if told.exists():
        for line in told.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
