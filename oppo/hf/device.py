"""Devices by name, and threads that overlap on a device."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from oppo.errors import ConfigError
from oppo.observe import SpanListener, silent
from oppo.placement import Hosted, Journal, Recipe, Thread
from oppo.scheduling import DEFAULT_TIME_SLICE, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

CPU = torch.device("cpu")

# cuDNN's attention plans each pair of shapes anew, and the length of the keys changes with every decode step: a plan
# can take tenths of a second. A program that knows its shapes may turn it on again.
torch.backends.cuda.enable_cudnn_sdp(False)


def device_of(name: str, *, exact: bool = False, gpus: int | None = None) -> torch.device:
    """Return the available device of that name, with its number.

    Args:
        name: ``cpu``, ``cuda``, ``cuda:1`` ...; ``auto`` is the first CUDA device, or the CPU without one.
        exact: ``auto`` is the CPU, whose kernels alone compute bits that do not depend on timing.
        gpus: how many CUDA devices there are on the machine that is meant; ``None``: this one.

    Raises:
        ConfigError: there is no such device.
    """
    here = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = here if gpus is None else gpus
    if name == "cpu" or (name == "auto" and (exact or not count)):
        return CPU
    number = torch.device("cuda" if name == "auto" else name).index or 0
    if number >= count:
        known = ", ".join(["cpu", *(f"cuda:{each}" for each in range(count))])
        if gpus is not None:
            raise ConfigError(f"there is no {name!r} on the machine that is assumed, which has {known}")
        build = "" if torch.version.cuda else f"; torch {torch.__version__} was built without CUDA"
        raise ConfigError(f"there is no {name!r} here: torch finds {known}{build}")
    return torch.device("cuda", number)


def numbered(device: torch.device) -> torch.device:
    """Return the device with its number: ``cuda`` alone is the current one of the calling thread."""
    if device.type != "cuda" or device.index is not None:
        return device
    return torch.device("cuda", torch.cuda.current_device())


def synchronised(device: torch.device) -> None:
    """Wait until the device has finished the work of this process on all streams; all threads then see the results."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def use_stream(device: torch.device) -> None:
    """Let the calling thread work on the device, in a stream of its own, so that threads overlap there."""
    if device.type == "cuda":
        torch.cuda.set_device(numbered(device))
        torch.cuda.set_stream(torch.cuda.Stream(device))


class DeviceThread(Thread):
    """A thread for models on one device: on a GPU it has a stream of its own, so that threads overlap there.

    Models that are hosted, and the results of calls, are complete for every other thread: hosting waits for what made
    the model, and a call ends, with its span, when the device has done its work. On a CPU it is a :class:`Thread`.

    Args:
        name, listener, setup, time_slice: see :class:`~oppo.placement.Thread`.
        device: of the models, such as ``"cuda:1"``; ``"cuda"`` is the current device.
    """

    def __init__(
        self,
        name: str,
        device: torch.device | str,
        *,
        listener: SpanListener = silent,
        setup: Callable[[], None] | None = None,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
    ) -> None:
        self.device = torch.device(device)

        def set_up() -> None:
            if setup is not None:
                setup()
            use_stream(self.device)

        super().__init__(name, listener=listener, setup=set_up, time_slice=time_slice)

    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Return a handle to ``instance``, complete for the thread's stream; ``journal`` records nothing."""
        hosted = super().host(instance, track=track, journal=journal)
        synchronised(self.device)
        return hosted

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run ``work`` in the thread, wait for the device, and return the result."""

        def synchronous(*args: P.args, **kwargs: P.kwargs) -> R:
            result = work(*args, **kwargs)
            if self.device.type == "cuda":
                torch.cuda.current_stream().synchronize()
            return result

        return await super().call_at(priority, track, label, synchronous, *args, **kwargs)
