"""Gradient checkpointing without a switch: layers are recomputed whenever the calling thread records gradients.

transformers' own works in training mode only, which a served model must never enter. This wrapper stays for the model's
whole life; in a thread that records no gradient, as in serving, it only passes the call on.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from oppo.errors import ModelRefused


def recompute(model: PreTrainedModel, every: int = 1) -> None:
    """Make every ``every``-th layer keep only its input, and run again in the backward pass (Chen et al. 2016).

    The layers' forward must be free of randomness: dropout is off in every model here.

    Args:
        model: changed in place, for good; its parameters and their names stay.
        every: 1 recomputes all layers; n recomputes the first, and each n-th after it.

    Raises:
        ModelRefused: transformers can checkpoint none of the model's layers.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelRefused(
            f"{type(model).__name__} has no layers that transformers can checkpoint: set gradient_checkpointing = 0"
        )
    for layer in layers[::every]:
        layer.forward = partial(_recomputed, layer)  # a partial, so that a deep copy calls its own layer


def _recomputed(layer: nn.Module, /, *args: object, **kwargs: object) -> object:
    forward = partial(type(layer).forward, layer, **kwargs)
    if not torch.is_grad_enabled():
        return forward(*args)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)
