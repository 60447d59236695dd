"""The way of weights from the trainer to an engine: a file in memory, CUDA IPC within one GPU, NCCL between several."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final, Literal, TypeAlias

import torch

from oppo.errors import ConfigError

Backend: TypeAlias = Literal["file", "ipc", "nccl"]

SIZES: Final = (
    "data_parallel_size",
    "pipeline_parallel_size",
    "tensor_parallel_size",
    "prefill_context_parallel_size",
)
"""The engine's arguments whose product is the number of its workers; each has a GPU."""


@dataclass(frozen=True, slots=True)
class Route:
    """How weights reach the workers.

    Attributes:
        workers: their number.
        trainer: the device that the weights come from.
    """

    backend: Backend
    workers: int
    trainer: torch.device


def require_route(arguments: Mapping[str, object], trainer: torch.device) -> None:
    """Check, before anything is loaded, that weights can go from the trainer to an engine with these arguments.

    Raises:
        ConfigError: they cannot.
    """
    from vllm.platforms import current_platform  # noqa: PLC0415 - takes seconds to import

    route_of(arguments, trainer, on_cpu=bool(current_platform.is_cpu()))


def route_of(arguments: Mapping[str, object], trainer: torch.device, *, on_cpu: bool) -> Route:
    """Return the way of weights to an engine with these arguments.

    An engine with several workers needs NCCL, which takes no two processes on one GPU.

    Args:
        arguments: of the engine; ``device_ids`` are the GPUs that it has, by number among those that are visible or by
            UUID. Without it they are the first ones.
        trainer: the device that the weights come from.
        on_cpu: whether vLLM computes on a CPU.

    Raises:
        ConfigError: trainer and workers are on GPUs between which weights cannot go; what to set is named.
    """
    workers = prod(int(str(arguments.get(size) or 1)) for size in SIZES)
    if on_cpu or trainer.type != "cuda":
        return Route("file", workers, trainer)
    number = torch.cuda.current_device() if trainer.index is None else trainer.index
    trainer = torch.device("cuda", number)
    used = _used(arguments.get("device_ids"), workers)
    if number not in used:
        return Route("nccl", workers, trainer)
    if workers == 1:
        _require_sharable_memory()
        return Route("ipc", workers, trainer)
    free = next(each for each in range(len(used) + 1) if each not in used)
    sizes = ", ".join(f"vllm.{size} = {arguments[size]}" for size in SIZES if arguments.get(size, 1) != 1)
    raise ConfigError(
        f"{sizes} puts vLLM on the GPUs {', '.join(map(str, used))}, and the trainer is on GPU {number}, but weights "
        f"go from one GPU to several only if none of these is its own: set models.device = 'cuda:{free}', or "
        "vllm.device_ids to other GPUs"
    )


def _require_sharable_memory() -> None:
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        settings = os.environ.get(name, "").lower().replace(" ", "").split(",")
        if "expandable_segments:true" in settings:
            raise ConfigError(
                f"{name} has expandable_segments:True, and vLLM, on the GPU of the trainer, reads weights by CUDA IPC, "
                "which needs memory of cudaMalloc: leave that out, or give the trainer another GPU than vLLM "
                "(placement.trainer)"
            )


def _used(chosen: object, workers: int) -> Sequence[int]:
    """Return the numbers of an engine's GPUs among those that are visible."""
    if not isinstance(chosen, Sequence) or isinstance(chosen, str) or not chosen:
        return range(workers)
    numbers = {uuid_of(number): number for number in range(torch.cuda.device_count())}
    ids = [each if isinstance(each, int) else numbers.get(str(each).removeprefix("GPU-"), -1) for each in chosen]
    if -1 in ids:
        raise ConfigError(
            f"vllm.device_ids = {list(chosen)} names a GPU that is not visible here: expected numbers from 0 to "
            f"{torch.cuda.device_count() - 1}, or some of {', '.join(f'GPU-{each}' for each in numbers)}"
        )
    return ids[:workers]


def uuid_of(number: int) -> str:
    """Return the UUID of a visible GPU."""
    return str(torch.cuda.get_device_properties(number).uuid)
