"""What an update adds up to: what its minibatches measured, and the work that was done."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from oppo.hf.train.packing import MicroBatch
from oppo.hf.train.staleness_metrics import StalenessMetrics
from oppo.losses import Loss


@dataclass(slots=True)
class UpdateMetrics:
    """What the minibatches of one update add up to.

    Attributes:
        loss: that is minimised.
        staleness: of their tokens.
        measured: by the loss, of each minibatch that made a step.
        norms: of its gradients, before they were clipped: the actor's, and the critic's if there is one.
        stepped: the rollouts of those.
        skipped: the rollouts of minibatches that made none.
        minibatches_skipped: how many those were.
        micro_batches: how many were read.
        padding, tokens: that were read in all, of which the first were padding.
    """

    loss: Loss
    staleness: StalenessMetrics
    measured: list[Mapping[str, float]] = field(default_factory=list)
    norms: list[tuple[float, ...]] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    minibatches_skipped: int = 0
    micro_batches: int = 0
    padding: int = 0
    tokens: int = 0

    def read(self, part: MicroBatch) -> None:
        """Count a micro-batch that was read, and taken back."""
        self.micro_batches += 1
        self.padding += part.padding
        self.tokens += part.ids.numel()

    def metrics(self) -> dict[str, float]:
        """Return what the loss tells of the minibatches that made a step, and ours for the work done."""
        work = {
            "train/minibatches": float(len(self.measured)),
            "train/minibatches_skipped": float(self.minibatches_skipped),
            "train/micro_batches": float(self.micro_batches),
            "train/padding_fraction": self.padding / self.tokens if self.tokens else 0.0,
        }
        if not self.measured:
            return work
        norms = zip(("train/grad_norm", "train/critic_grad_norm"), np.mean(self.norms, axis=0).tolist(), strict=False)
        return work | self.staleness.metrics() | dict(self.loss.metrics(self.measured)) | dict(norms)
