"""The machine that figures were measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


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


def cores_here() -> tuple[int, ...]:
    """Return the cores that this process is bound to."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def _cpu() -> str:
    """Return the processor's name, as far as the system tells."""
    told = Path("/proc/cpuinfo")
    if told.exists():
        for line in told.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
