"""Publishing weights into the engine beside copying as many bytes once, in turns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from oppo import observe
from oppo.models import Policy, Weights


@dataclass(frozen=True, slots=True)
class PublishComparison:
    """The result of :func:`compare_publishing`, by round.

    Attributes:
        bytes: of the weights.
        publishing: seconds until the engine serves new weights.
        copying: seconds of copying as many bytes once.
    """

    bytes: int
    publishing: tuple[float, ...]
    copying: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The median seconds of publishing over those of copying."""
        return median(self.publishing) / median(self.copying)


async def compare_publishing(
    policy: Policy, tensors: Mapping[str, Tensor], *, rounds: int = 5, clock: Callable[[], float] = observe.now
) -> PublishComparison:
    """Return the seconds of both over ``rounds`` rounds in which they take turns; a round before these is not counted.

    Args:
        policy: decodes nothing meanwhile.
        tensors: its weights by ``state_dict`` name, each storage once.
        clock: seconds.
    """
    size = sum(tensor.nbytes for tensor in tensors.values())
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    publishing, copying = list[float](), list[float]()
    for _ in range(rounds + 1):
        start = clock()
        await policy.load(Weights(policy.version + 1, tensors))
        published = clock()
        target.copy_(source)
        copied = clock()
        publishing.append(published - start)
        copying.append(copied - published)
    return PublishComparison(size, tuple(publishing[1:]), tuple(copying[1:]))
