"""Weights, gradients and optimizer states in shards, one for each rank: FSDP2, ``torch.distributed.fsdp``."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers.modeling_layers import GradientCheckpointingLayer

from oppo.errors import ModelRefused
from oppo.hf.train.actor_critic import ActorCritic


def shard(models: ActorCritic, mesh: DeviceMesh) -> None:
    """Give each rank of ``mesh`` a shard of every parameter; a layer's are whole only while it computes.

    Gradients are summed over the ranks, not averaged: losses divide by the size of the whole minibatch.

    Raises:
        ModelRefused: the actor or the critic has no layers that transformers marks as such, or trained weights are of
            several dtypes.
    """
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
    for part in _shards(models):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def reset(models: nn.Module) -> None:
    """Forget a forward or backward pass that has failed midway, so that the next one begins afresh."""
    if isinstance(models, FSDPModule):
        models.reshard()
        models.reset_iter_state()


@torch.no_grad()
def whole(tensor: Tensor) -> Tensor:
    """Return a tensor that is no shard: one that is, gathered from all ranks, which all call this."""
    gathered: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return gathered.detach()


def alike(tensor: Tensor, shape: Tensor) -> Tensor:
    """Return a whole tensor as ``shape`` lies: this rank's shard of it, or all of it."""
    if isinstance(shape, DTensor):
        return distribute_tensor(tensor.to(shape.device), shape.device_mesh, shape.placements)
    return tensor.to(shape.device)


def _shards(models: nn.Module) -> Iterator[FSDPModule]:
    yield from (module for module in models.modules() if isinstance(module, FSDPModule))
