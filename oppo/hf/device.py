"""Where models are: a device by its name, and threads that work beside one another on one."""

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
    """Return the device of that name, with its number; it is there.

    Args:
        name: ``cpu``, ``cuda``, ``cuda:1`` ...; ``auto`` is the first CUDA device, or the CPU where there is none.
        exact: every bit has to be independent of timing, which only a CPU's kernels are: so ``auto`` is the CPU.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "cpu" or (name == "auto" and (exact or not torch.cuda.is_available())):
        return CPU
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = torch.device("cuda" if name == "auto" else name).index or 0
    if number >= there:
        known = ", ".join(["cpu", *(f"cuda:{each}" for each in range(there))])
        build = "" if torch.version.cuda else f"; torch {torch.__version__} was built without CUDA"
        raise ConfigError(f"there is no {name!r} here: torch finds {known}{build}")
    return torch.device("cuda", number)


def synchronised(device: torch.device) -> None:
    """Return when the device has done what this process asked of it, on whatever stream: all threads may rely on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def use_stream(device: torch.device) -> None:
    """Let the calling thread work on the device in a stream of its own, so that threads overlap there."""
    if device.type == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream(device))


class DeviceThread(Thread):
    """A thread whose calls end when the device has done their work: others may read it, and spans say when it was busy.

    For a thread that has :func:`use_stream` in its setup.
    """

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run ``work`` in the thread, wait for the device, and return the result."""

        def done(*args: P.args, **kwargs: P.kwargs) -> R:
            result = work(*args, **kwargs)
            torch.cuda.current_stream().synchronize()
            return result

        return await super().call_at(priority, track, label, done, *args, **kwargs)
