"""The machine that figures were measured on."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True, slots=True)
class Machine:
    """The facts needed to compare figures with those of another machine.

    Attributes:
        cores: that this process may use.
        load: mean number of runnable processes in the last minute: well above 1, other programs disturbed the figures.
    """

    cpu: str
    cores: int
    memory_gb: float
    system: str
    device: str
    load: float

    @classmethod
    def here(cls, device: str) -> Machine:
        """Return this machine."""
        pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 0
        return cls(
            cpu=processor(),
            cores=len(cores_here()),
            memory_gb=round(pages / 1e9, 1),
            system=f"{platform.system()} {platform.machine()}",
            device=device if device == "cpu" else torch.cuda.get_device_name(device),
            load=round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else 0.0,
        )


def cores_here() -> tuple[int, ...]:
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
