"""GSPO: the clipped ratio is that of a whole response (Zheng et al. 2025, arXiv 2507.18071)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from oppo.algorithms.grpo import GRPO
from oppo.declared import NonNegative, Positive
from oppo.staleness import Correction

if TYPE_CHECKING:
    from oppo.losses import SequenceLoss


@dataclass(frozen=True, kw_only=True)
class GSPO(GRPO):
    """GSPO: as `grpo`, but ratio, clip and importance weights are those of whole responses; no KL penalty."""

    kl: NonNegative = 0.0
    clip: Positive = 3e-4
    clip_high: Positive | None = 4e-4

    @property
    def correction(self) -> Correction:
        """The correction of stale responses."""
        return replace(super().correction, level="sequence")

    def loss(self) -> SequenceLoss:
        """Return the loss of the policy."""
        from oppo.losses import SequenceLoss  # noqa: PLC0415 - torch takes seconds to import

        return SequenceLoss(**vars(super().loss()))
