"""Taking over somebody's weights in place: all of them, or none."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from oppo.errors import ModelError


@torch.no_grad()
def adopt(module: nn.Module, weights: Mapping[str, object]) -> int:
    """Make ``module`` compute with ``weights``, named as in its ``state_dict``; return how many tensors were copied.

    A tensor that already is the module's own memory costs nothing.

    Raises:
        ModelError: a name is missing or unknown, or a shape differs; nothing has been changed then.
    """
    own: dict[str, Tensor] = module.state_dict(keep_vars=True)
    absent = [name for name in own if name not in weights]
    unknown = [name for name in weights if name not in own]
    if absent or unknown:
        raise ModelError(
            f"{type(module).__name__} cannot take these weights: {len(absent)} missing {absent[:3]}, {len(unknown)} "
            f"unknown {unknown[:3]}; names must be those of its state_dict()"
        )
    moves: list[tuple[Tensor, Tensor]] = []
    for name, target in own.items():
        value = weights[name]
        if not isinstance(value, Tensor) or value.shape != target.shape:
            came = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ModelError(f"{type(module).__name__}: {name} should have shape {tuple(target.shape)}, not {came}")
        if value.data_ptr() != target.data_ptr():
            moves.append((target, value))
    for target, value in moves:
        target.copy_(value)
    return len(moves)
