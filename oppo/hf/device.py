"""Devices by name, and threads that overlap on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from oppo.errors import ConfigError
from oppo.placement import Thread
from oppo.scheduling import Priority

P = ParamSpec("P")
R = TypeVar("R")

CPU = torch.device("cpu")


def device_of(name: str, *, exact: bool = False) -> torch.device:
    """Return the available device of that name, with its number.

    Args:
        name: ``cpu``, ``cuda``, ``cuda:1`` ...; ``auto`` is the first CUDA device, or the CPU without one.
        exact: ``auto`` is the CPU, whose kernels alone compute bits that do not depend on timing.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "cpu" or (name == "auto" and (exact or not torch.cuda.is_available())):
        return CPU
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = torch.device("cuda" if name == "auto" else name).index or 0
    if number >= count:
        known = ", ".join(["cpu", *(f"cuda:{each}" for each in range(count))])
        build = "" if torch.version.cuda else f"; torch {torch.__version__} was built without CUDA"
        raise ConfigError(f"there is no {name!r} here: torch finds {known}{build}")
    return torch.device("cuda", number)


def synchronised(device: torch.device) -> None:
    """Wait until the device has finished the work of this process on all streams; all threads then see the results."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def use_stream(device: torch.device) -> None:
    """Let the calling thread work on the device, in a stream of its own, so that threads overlap there."""
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.cuda.set_stream(torch.cuda.Stream(device))


class DeviceThread(Thread):
    """A thread whose calls end when the device has done their work: other threads may read it, and spans include it.

    The thread's setup calls :func:`use_stream`.
    """

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run ``work`` in the thread, wait for the device, and return the result."""

        def synchronous(*args: P.args, **kwargs: P.kwargs) -> R:
            result = work(*args, **kwargs)
            torch.cuda.current_stream().synchronize()
            return result

        return await super().call_at(priority, track, label, synchronous, *args, **kwargs)
