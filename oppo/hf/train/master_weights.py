"""Float32 copies of 16-bit weights, on which an optimizer steps in their place (Micikevicius et al. 2018).

A bfloat16 number has 8 significant bits: a step of less than a 256th of a weight, as nearly all steps of PPO are,
would be rounded away. Here steps add up in the copy, and the weight follows when they have become a bit of its own.
Gradients of several micro-batches add up in float32 too. The price is 8 bytes for each such parameter, the optimizer's
own two moments, which are float32 then, not counted.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class MasterWeights:
    """What an optimizer is to step on: float32 copies of parameters of fewer bits, other parameters themselves.

    Example:
        >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> masters = MasterWeights([weight])
        >>> optimizer = torch.optim.SGD([masters.of(weight)], lr=1e-3)
        >>> for _ in range(4):
        ...     weight.grad = torch.ones_like(weight)
        ...     masters.collect()
        ...     optimizer.step()
        ...     masters.write_back()
        >>> round(masters.of(weight).item(), 4), weight.item()
        (0.984, 1.0)
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._copies = {
            parameter: nn.Parameter(parameter.detach().float())
            for parameter in parameters
            if parameter.dtype.itemsize < torch.float32.itemsize
        }

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what is optimized in the place of ``parameter``."""
        return self._copies.get(parameter, parameter)

    @torch.no_grad()
    def collect(self) -> None:
        """Add the parameters' gradients to those of their copies, and clear them."""
        for parameter, master in self._copies.items():
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                master.grad = gradient if master.grad is None else master.grad.add_(gradient)
                parameter.grad = None

    @torch.no_grad()
    def write_back(self) -> None:
        """Give the parameters the values of their copies, rounded."""
        for parameter, master in self._copies.items():
            parameter.copy_(master)

    def clear(self) -> None:
        """Forget what gradients the parameters hold; those of the copies are the optimizer's to clear."""
        for parameter in self._copies:
            parameter.grad = None
