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


def workers_of(arguments: Mapping[str, object]) -> int:
    """Return the number of an engine's workers."""
    return prod(int(str(arguments.get(size) or 1)) for size in SIZES)


def placed(arguments: Mapping[str, object], device: torch.device) -> dict[str, object]:
    """Return the arguments of an engine whose GPUs begin with a device, unless they name others."""
    if not device.index or arguments.get("device_ids"):
        return dict(arguments)
    return {**arguments, "device_ids": list(range(device.index, device.index + workers_of(arguments)))}


def route_of(arguments: Mapping[str, object], trainer: torch.device, *, on_cpu: bool, gpus: int | None = None) -> Route:
    """Return the way of weights to an engine with these arguments.

    An engine with several workers needs NCCL, which takes no two processes on one GPU.

    Args:
        arguments: of the engine; ``device_ids`` are the GPUs that it has, by number among those that are visible or by
            UUID. Without it they are the first ones.
        trainer: the device that the weights come from.
        on_cpu: whether vLLM computes on a CPU.
        gpus: how many GPUs there are on the machine that is meant; ``None``: this one.

    Raises:
        ConfigError: trainer and workers are on GPUs between which weights cannot go, or there are too few GPUs; what to
            set is named.
    """
    workers = workers_of(arguments)
    used = () if on_cpu else gpus_of(arguments, gpus)
    if on_cpu or trainer.type != "cuda":
        return Route("file", workers, trainer)
    number = torch.cuda.current_device() if trainer.index is None else trainer.index
    trainer = torch.device("cuda", number)
    if number not in used:
        return Route("nccl", workers, trainer)
    if workers == 1:
        if gpus is None:
            _require_sharable_memory()
        return Route("ipc", workers, trainer)
    free = next(each for each in range(len(used) + 1) if each not in used)
    sizes = ", ".join(f"vllm.{size} = {arguments[size]}" for size in SIZES if arguments.get(size, 1) != 1)
    raise ConfigError(
        f"{sizes} puts vLLM on the GPUs {', '.join(map(str, used))}, and the trainer is on GPU {number}, but weights "
        f"go from one GPU to several only if none of these is its own: set placement.trainer = 'cuda:{free}', or "
        "placement.policy to the first of other GPUs"
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


def gpus_of(arguments: Mapping[str, object], gpus: int | None = None) -> Sequence[int]:
    """Return the numbers of an engine's GPUs among those that are visible.

    Args:
        arguments: as :func:`route_of` has them.
        gpus: likewise.

    Raises:
        ConfigError: there is no such GPU.
    """
    chosen, workers = arguments.get("device_ids"), workers_of(arguments)
    count = torch.cuda.device_count() if gpus is None else gpus
    if not isinstance(chosen, Sequence) or isinstance(chosen, str) or not chosen:
        chosen = range(workers)
    numbers = {uuid_of(number): number for number in range(count)} if gpus is None else {}
    ids = [each if isinstance(each, int) else numbers.get(str(each).removeprefix("GPU-"), -1) for each in chosen]
    if not all(0 <= each < count for each in ids[:workers]) or len(ids) < workers:
        known = f", or some of {', '.join(f'GPU-{each}' for each in numbers)}" if numbers else ""
        raise ConfigError(
            f"vLLM has {workers} workers, a GPU for each, and they would be on the GPUs {list(chosen)}: expected "
            f"numbers from 0 to {count - 1}{known}, as placement.policy (the first) or vllm.device_ids name them"
        )
    return ids[:workers]


def uuid_of(number: int) -> str:
    """Return the UUID of a visible GPU."""
    return str(torch.cuda.get_device_properties(number).uuid)
