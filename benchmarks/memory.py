"""The memory that a process has held; the standard library is enough, as in the peer's environment."""

from __future__ import annotations

import resource
from pathlib import Path


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
