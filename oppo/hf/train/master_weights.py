"""Float32 copies of 16-bit weights, on which an optimizer steps in their place (Micikevicius et al. 2018).

A bfloat16 number has 8 significant bits: rounding would lose a step of less than a 256th of a weight, as nearly all
steps of PPO are. Here steps add up in the copy, and the weight changes when they amount to one of its bits. Gradients
of several micro-batches add up in float32 too. The cost is 8 bytes for each such parameter, besides the optimizer's two
moments, which are float32 as well.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class MasterWeights:
    """The parameters that an optimizer steps on: float32 copies of those with fewer bits, the others themselves.

    Example:
        >>> weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
        >>> masters = MasterWeights([weight])
        >>> optimizer = torch.optim.SGD([masters.of(weight)], lr=1e-3)
        >>> for _ in range(4):
        ...     weight.grad = torch.ones_like(weight)
        ...     masters.collect()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     masters.write_back()
        >>> round(masters.of(weight).item(), 4), weight.item()
        (0.996, 0.99609375)
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self._copies = {
            parameter: nn.Parameter(parameter.detach().float())
            for parameter in parameters
            if parameter.dtype.itemsize < torch.float32.itemsize
        }

    def of(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return what the optimizer steps on in the place of ``parameter``."""
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
        """Set the parameters to the values of their copies, rounded."""
        for parameter, master in self._copies.items():
            parameter.copy_(master)

    def clear(self) -> None:
        """Clear the gradients of the parameters; the optimizer clears those of the copies."""
        for parameter in self._copies:
            parameter.grad = None
