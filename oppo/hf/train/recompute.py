"""Gradient checkpointing that nobody has to switch: layers that are recomputed whenever a gradient is recorded.

transformers' own is bound to training mode, which a model that is served must never enter. Here the wrapper stays for
the model's whole life and looks at what the calling thread does: where no gradient is recorded, as in serving, it
passes the call on.
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
    """Have every ``every``-th layer keep its input only, and run again in the backward pass (Chen et al. 2016).

    The layers' forward must be free of randomness: dropout is off in every model here.

    Args:
        model: changed in place, for good; its parameters and their names stay as they are.
        every: 1 is all layers; n is the first, and each n-th after it.

    Raises:
        ModelRefused: the model has no layers of a kind that can be recomputed.
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
