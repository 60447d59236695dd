"""Machines that a run is planned for, which need not be this one."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Self

from oppo.errors import ConfigError
from oppo.simulate.costs import GPUS, Gpu

_ASSUMED: Final = re.compile(
    r"(?:(?P<machines>[1-9]\d{0,3})x)?(?P<gpus>[1-9]\d{0,2})x"
    r"(?:(?P<bare>[1-9]\d{0,4})GB|(?P<name>.+?)(?:-(?P<size>[1-9]\d{0,4})GB)?)"
)


@dataclass(frozen=True, slots=True)
class Hardware:
    """The GPUs (``bytes``: memory of each; ``gpus``: in each machine) that a run is planned for."""

    name: str
    bytes: int
    gpus: int
    machines: int = 1

    @classmethod
    def assumed(cls, text: str) -> Self:
        """Return the hardware of a text: ``8xH100-80GB``, ``1x24GB`` or, with several machines, ``2x8xH100-80GB``."""
        found = _ASSUMED.fullmatch(text)
        gpu = GPUS.get((found["name"] or "").lower()) if found else None
        memory = (found["size"] or found["bare"]) if found else None
        if found is None or (memory is None and gpu is None):
            alone = (name for name in GPUS if not name.endswith("gb"))
            raise ConfigError(
                f"--assume takes [MACHINESx]GPUSxNAME-MEMORYGB, such as 8xH100-80GB or 2x8xH100-80GB, or the memory "
                f"alone, 1x24GB; of {', '.join(alone)} the memory may be left out; got {text!r}"
            )
        size = int(gpu.memory) if memory is None and gpu is not None else int(memory or 0) * 10**9
        return cls(found["name"] or "GPU", size, int(found["gpus"]), int(found["machines"] or 1))

    @property
    def gpu(self) -> Gpu | None:
        sized = f"{self.name}-{self.bytes // 10**9}gb".lower()
        return GPUS.get(self.name.lower()) or GPUS.get(sized)

    def __str__(self) -> str:
        each = f"{self.gpus} x {self.name} with {self.bytes // 10**9} GB"
        return each if self.machines == 1 else f"{self.machines} machines of {each}"
