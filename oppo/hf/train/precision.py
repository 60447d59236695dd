"""Which types of weights a device computes with, and which can be trained."""

from __future__ import annotations

import torch
from transformers import PreTrainedModel

from oppo.errors import ConfigError, ModelRefused


def require_supported(dtype: torch.dtype, device: torch.device) -> None:
    """Return only if models in ``dtype`` can be served and trained on ``device``.

    Raises:
        ConfigError: they cannot; says which type to choose.
    """
    if dtype == torch.float16 and device.type == "cpu":
        raise ConfigError(
            "float16 is not for a CPU, where it is slow and its gradients underflow: expected models.dtype = "
            "'float32' or 'bfloat16'"
        )
    if (
        dtype == torch.bfloat16
        and device.type == "cuda"
        and not torch.cuda.is_bf16_supported(including_emulation=False)
    ):
        raise ConfigError(
            f"{torch.cuda.get_device_name(device)} does not compute in bfloat16 itself: expected models.dtype = "
            "'float32'"
        )


def require_trainable(model: PreTrainedModel) -> None:
    """Return only if a gradient through ``model`` means something in the type of its weights.

    Raises:
        ModelRefused: they are float16.
    """
    if model.dtype == torch.float16:
        raise ModelRefused(
            f"{type(model).__name__} is in float16, in which most gradients of PPO underflow to 0, and losses are not "
            "scaled here: load what is trained with dtype = 'bfloat16' or 'float32'"
        )
