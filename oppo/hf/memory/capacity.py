"""The memory that devices have, here or on machines that are assumed."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import psutil
import torch

from oppo.errors import ConfigError

_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""The memory limit of a container, where there is one."""

_ASSUMED: Final = re.compile(r"(?:(?P<machines>[1-9]\d{0,3})x)?(?P<gpus>[1-9]\d{0,2})x(?P<name>[^x]+)-(?P<size>\d+)GB")


def free(device: torch.device) -> int:
    """Return the bytes of a device that are free now; of a CPU, those that a process can get without swapping."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    available: int = psutil.virtual_memory().available
    for limit in _LIMITS:
        with suppress(OSError, ValueError):  # "max": no limit
            available = min(available, int(limit.read_text()))
    return available


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs of machines that a run is planned for.

    Attributes:
        name: of a GPU.
        bytes: memory of each.
        gpus: in each machine.
        machines: their number.
    """

    name: str
    bytes: int
    gpus: int
    machines: int = 1

    @classmethod
    def assumed(cls, text: str) -> Self:
        """Return the hardware of a text such as ``8xH100-80GB`` or, with several machines, ``2x8xH100-80GB``.

        Raises:
            ConfigError: it is no such text.
        """
        found = _ASSUMED.fullmatch(text)
        if found is None:
            raise ConfigError(
                f"--assume takes [MACHINESx]GPUSxNAME-MEMORYGB, such as 8xH100-80GB or 2x8xH100-80GB, got {text!r}"
            )
        return cls(found["name"], int(found["size"]) * 10**9, int(found["gpus"]), int(found["machines"] or 1))

    def __str__(self) -> str:
        each = f"{self.gpus} x {self.name} with {self.bytes // 10**9} GB"
        return each if self.machines == 1 else f"{self.machines} machines of {each}"


def memory_of(device: torch.device, assumed: Hardware | None = None) -> tuple[int, int] | None:
    """Return the free and all bytes of a device; ``None`` for the CPU of a machine that is assumed."""
    if assumed is not None:
        return None if device.type == "cpu" else (assumed.bytes, assumed.bytes)
    there = free(device)
    return there, torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else there
