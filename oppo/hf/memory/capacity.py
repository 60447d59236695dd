"""The memory that devices have."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil
import torch

_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The memory limit of a container, where there is one."""


def free(device: torch.device) -> int:
    """Return the bytes of a device that are free now; of a CPU, those that a process can get without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available: int = psutil.virtual_memory().available
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # "max": no limit
            available = min(available, int(limit.read_text()))
    return available
