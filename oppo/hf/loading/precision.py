"""Which dtypes of weights a device supports."""

from __future__ import annotations

import torch

from oppo.errors import ConfigError


def require_supported(dtype: torch.dtype, device: torch.device) -> None:
    """Accept a dtype in which models can be served and trained on ``device``.

    Raises:
        ConfigError: they cannot; the message names dtypes that can.
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
