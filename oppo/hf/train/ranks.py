"""Training ranks: processes that make an update together.

::

    micro-batches ── deal ──> rank 0, rank 1, ...   equally many each, some of them idle
    gradients, measurements ── summed ──> equal in every rank, so that all step alike

Each rank has the whole models, or a shard of weights, gradients and optimizer states: FSDP2,
``torch.distributed.fsdp``.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, Final, TypeVar, cast
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from oppo.errors import ConfigError, ModelError, ModelRefused, one_line
from oppo.hf.devices import numbered
from oppo.hf.train.actor_critic import ActorCritic, ActorCriticRecipe
from oppo.placement.ranks import listener

T = TypeVar("T")

_LAUNCHER = frozenset({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"})
"""Variables of a program that launched this one: accelerate would take them for a group of its own."""


class Team:
    """The ranks of an update, here one process; every method is called by all of them, in the same order."""

    rank = 0
    size = 1

    def share(self, costs: Sequence[float]) -> Sequence[int | None]:
        """Return this rank's parts of the work, in order; ``None``: it waits in that round, see :func:`deal`."""
        return range(len(costs))

    def sum(self, values: Tensor) -> Tensor:
        return values

    def sum_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        """Replace the gradients of ``weights`` by their sums; a weight that no rank has a gradient of keeps none."""

    def broadcast(self, tensor: Tensor) -> Tensor:
        return tensor

    def first(self, value: T) -> T:
        """Return the value of the first rank that gave a true one, a value of JSON; the own one, a false one, else."""
        return value

    def once(self, work: Callable[[], None]) -> None:
        work()


class Ranked(Team):
    def __init__(self, rank: int, size: int, meeting: str, device: torch.device) -> None:
        for name in _LAUNCHER & os.environ.keys():
            del os.environ[name]
        self.rank, self.size, self.device = rank, size, device
        if not dist.is_initialized():  # by another trainer of these processes
            _meet(rank, size, meeting, "nccl" if device.type == "cuda" else "gloo")
        self.mesh: DeviceMesh = init_device_mesh(device.type, (size,))

    def share(self, costs: Sequence[float]) -> Sequence[int | None]:
        return deal(costs, self.size, self.rank)

    def sum(self, values: Tensor) -> Tensor:
        total = values.to(self.device, copy=True)
        dist.all_reduce(total)
        return total

    def sum_gradients(self, weights: Iterable[nn.Parameter]) -> None:
        # Gradients of sharded weights are summed as they are made.
        weights = [weight for weight in weights if not isinstance(weight, DTensor)]
        have = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.uint8, device=self.device)
        dist.all_reduce(have, dist.ReduceOp.MAX)
        for weight, has in zip(weights, have.tolist(), strict=True):
            if has:
                weight.grad = torch.zeros_like(weight) if weight.grad is None else weight.grad
                dist.all_reduce(weight.grad)

    def broadcast(self, tensor: Tensor) -> Tensor:
        given = tensor.detach().to(self.device, copy=bool(self.rank)).contiguous()
        dist.broadcast(given, src=0)
        return given

    def first(self, value: T) -> T:
        # JSON, which runs nothing, carries the value.
        said = json.dumps(value).encode() if value else b""
        lengths = torch.zeros(self.size, dtype=torch.int64, device=self.device)
        lengths[self.rank] = len(said)
        dist.all_reduce(lengths)
        speaker = next((rank for rank, length in enumerate(lengths.tolist()) if length), None)
        if speaker is None:
            return value
        text = torch.empty(int(lengths[speaker]), dtype=torch.uint8)
        if speaker == self.rank:
            text = torch.frombuffer(bytearray(said), dtype=torch.uint8)
        text = text.to(self.device)
        dist.broadcast(text, src=speaker)
        return cast("T", json.loads(bytes(text.tolist())))

    def once(self, work: Callable[[], None]) -> None:
        error: Exception | None = None
        if not self.rank:
            try:
                work()
            except Exception as raised:  # noqa: BLE001 - all ranks raise it
                error = raised
        said = self.first("" if error is None else one_line(error))
        if error is not None:
            raise error
        if said:
            raise ModelError(f"rank 0 failed: {said}")


def _meet(rank: int, size: int, meeting: str, backend: str) -> None:
    # Ranks of one machine talk over its loopback interface alone.
    if meeting.startswith("file:"):
        loopback = next((name for _, name in socket.if_nameindex() if name in {"lo", "lo0"}), None)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            if loopback is not None:
                os.environ.setdefault(variable, loopback)
        dist.init_process_group(backend, init_method=meeting, rank=rank, world_size=size)
        return
    # Not by `init_method`: torch would listen at all addresses of the machine, and under other keys than a given store.
    where, server = urlsplit(meeting), listener(meeting)
    held: dict[str, Any] = {} if server is None else {"master_listen_fd": server.detach(), "use_libuv": True}
    store = dist.TCPStore(  # type: ignore[attr-defined] # not in its list of exports
        str(where.hostname), int(where.port or 0), size, is_master=bool(held), wait_for_workers=False, **held
    )
    dist.init_process_group(backend, store=store, rank=rank, world_size=size)


def deal(costs: Sequence[float], size: int, rank: int) -> list[int | None]:
    """Return the parts of a rank, one for each round; ``None`` for a round in which there is none left for it.

    A round has a part of similar cost for each of ``size`` ranks, since sharded weights are gathered layer by layer in
    step. Within a round the most expensive part goes to the rank that has had the least.

    Example:
        >>> [deal([5, 9, 1], 2, rank) for rank in (0, 1)]
        [[1, None], [0, 2]]
    """
    # Nothing is known of earlier work, which a resumed run has not done: sums round by which rank has which parts.
    costliest, had = sorted(range(len(costs)), key=lambda part: -costs[part]), [0.0] * size
    mine: list[int | None] = []
    for start in range(0, len(costliest), size):
        dealt: list[int | None] = [None] * size
        for part, to in zip(costliest[start : start + size], sorted(range(size), key=had.__getitem__), strict=False):
            dealt[to] = part
            had[to] += costs[part]
        mine.append(dealt[rank])
    return mine


def shard(models: ActorCritic, mesh: DeviceMesh) -> None:
    # Gradients are summed over the ranks, not averaged: losses divide by the size of the whole minibatch.
    dtypes = {str(parameter.dtype) for parameter in models.parameters() if parameter.requires_grad}
    if len(dtypes) > 1:
        raise ModelRefused(
            f"the trained weights are of {' and '.join(sorted(dtypes))}, but shards are gathered in one dtype: load "
            "actor and critic with the same, or train in ranks with whole weights (shard = false)"
        )
    for model in filter(None, (models.actor, models.critic)):
        if not any(isinstance(module, GradientCheckpointingLayer) for module in model.modules()):
            raise ModelRefused(
                f"{type(model).__name__} has no layers that transformers marks as such, so it cannot be sharded: train "
                "it in ranks with whole weights (shard = false), or in one process"
            )
    # In 16 bits a sum of gradients would be rounded once for each rank.
    sharded = partial(fully_shard, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
    for module in list(models.modules()):
        if isinstance(module, GradientCheckpointingLayer):
            sharded(module)
    sharded(models)  # embeddings and heads: the models' own forward passes would bypass a hook of theirs
    for part in (module for module in models.modules() if isinstance(module, FSDPModule)):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def reset(models: nn.Module) -> None:
    if isinstance(models, FSDPModule):
        models.reshard()
        models.reset_iter_state()


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    gathered: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered.detach()


def alike(tensor: Tensor, shape: Tensor) -> Tensor:
    if isinstance(shape, DTensor):
        return distribute_tensor(tensor.to(shape.device), shape.device_mesh, shape.placements)
    return tensor.to(shape.device)


@dataclass(frozen=True, slots=True)
class Replicas:
    """How the ranks of a trainer have its models; ``loaded``: this rank's, which is sent the trained weights."""

    shard: bool = True
    devices: Sequence[torch.device] = ()
    recipe: ActorCriticRecipe | None = None
    loaded: bool = False

    def device(self, rank: int, size: int, models: ActorCritic) -> torch.device:
        if self.devices and len(self.devices) != size:
            raise ConfigError(f"expected a device for each of {size} ranks, got {len(self.devices)}")
        return numbered(self.devices[rank]) if self.devices and not self.loaded else models.actor.device

    def of(self, whole: ActorCritic, team: Ranked) -> ActorCritic:
        """Return the models that a rank trains: ``whole``, or a copy on the rank's device, or its shard of one."""
        models = whole
        if not self.loaded and (team.rank or self.shard or team.device != whole.actor.device):
            models = whole.copied(team.device)
        if self.recipe is not None:  # a rank may have loaded other weights
            for weight in chain.from_iterable(models.trained()):
                weight.detach().copy_(team.broadcast(weight))
        if self.shard:
            shard(models, team.mesh)
        return models

    def remote(self) -> tuple[ActorCriticRecipe, Replicas]:
        if self.recipe is None:
            raise ModelError(
                "a trainer with a rank on another machine needs to know how its models are loaded there: expected "
                "HfTrainer(..., recipe=ActorCriticRecipe(actor=ModelRecipe(path=...)))"
            )
        return self.recipe, replace(self, loaded=True)


SHARDS: Final = Replicas()  # each rank has a shard, on the models' device
