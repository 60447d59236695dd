"""The most memory that the devices of this process had in use, as measured."""

from __future__ import annotations

import threading
from contextlib import suppress
from types import TracebackType
from typing import Final, Self

import psutil
import torch

from oppo.hf.device import CPU

_INTERVAL: Final = 0.02
"""Seconds between two readings of the system's figures."""


class Peak:
    """Measures memory between its beginning and its end; a context manager.

    On a CPU the system says how much this process and its children have, shared memory counted once; on a GPU, PyTorch
    what this process has allocated.
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="oppo-memory", daemon=True)
        self._most = 0

    def __enter__(self) -> Self:
        for number in _gpus():
            torch.cuda.reset_peak_memory_stats(number)
        self._most = self._used()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        del kind, error, tb
        self._over.set()
        self._thread.join()

    def by_device(self) -> dict[torch.device, int]:
        """Return the most bytes so far on each device that has any."""
        on_gpus = {torch.device("cuda", each): torch.cuda.max_memory_allocated(each) for each in _gpus()}
        return {CPU: max(self._most, self._used()), **{device: most for device, most in on_gpus.items() if most}}

    def _watch(self) -> None:
        while not self._over.wait(_INTERVAL):
            self._most = max(self._most, self._used())

    def _used(self) -> int:
        used = 0
        for process in [self._process, *self._process.children(recursive=True)]:
            with suppress(psutil.Error):  # it has ended
                used += getattr(process.memory_full_info(), "pss", process.memory_info().rss)
        return used


def _gpus() -> range:
    return range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
