"""What an update adds up to: what its minibatches measured, and the work that was done."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from oppo.hf.drift import Drift


class Measured(NamedTuple):
    """What one minibatch measured: sums over its micro-batches, each divided by the minibatch's tokens.

    The last two are the critic's; without one they stay 0, and are not reported.
    """

    policy: float
    approxkl: float
    clipfrac: float
    entropy: float
    ratio: float
    kl: float
    value: float = 0.0
    value_clipfrac: float = 0.0


@dataclass(slots=True)
class Tally:
    """What the minibatches of one update add up to.

    Attributes:
        drift: of their tokens.
        has_reference: whether there is one; without it nothing is said of a KL to it.
        measured: of each minibatch that made a step.
        norms: of its gradients, before they were clipped: the actor's, and the critic's if there is one.
        stepped: the rollouts of those.
        skipped: the rollouts of minibatches that made none.
        minibatches_skipped: how many those were.
        micro_batches: how many were read.
        padding, read: tokens, of which the first were padding.
    """

    drift: Drift
    has_reference: bool = True
    measured: list[Measured] = field(default_factory=list)
    norms: list[tuple[float, ...]] = field(default_factory=list)
    stepped: set[int] = field(default_factory=set)
    skipped: set[int] = field(default_factory=set)
    minibatches_skipped: int = 0
    micro_batches: int = 0
    padding: int = 0
    read: int = 0

    def metrics(self) -> dict[str, float]:
        """Return TRL's names for the means over minibatches that made a step, and ours for the work done."""
        work = {
            "train/minibatches": float(len(self.measured)),
            "train/minibatches_skipped": float(self.minibatches_skipped),
            "train/micro_batches": float(self.micro_batches),
            "train/padding_fraction": self.padding / self.read if self.read else 0.0,
        }
        if not self.measured:
            return work
        work |= self.drift.metrics()
        mean = Measured(*np.mean(self.measured, axis=0).tolist())
        ratios = [measured.ratio for measured in self.measured]
        actor_norm, *critic_norm = np.mean(self.norms, axis=0).tolist()
        told = work | {
            "loss/policy_avg": mean.policy,
            "policy/approxkl_avg": mean.approxkl,
            "policy/clipfrac_avg": mean.clipfrac,
            "policy/entropy_avg": mean.entropy,
            "val/ratio": mean.ratio,
            "val/ratio_var": float(np.var(ratios, ddof=1)) if len(ratios) > 1 else 0.0,
            "train/grad_norm": actor_norm,
        }
        if self.has_reference:
            told["policy/kl_avg"] = mean.kl
        for norm in critic_norm:
            told |= {
                "loss/value_avg": mean.value,
                "val/clipfrac_avg": mean.value_clipfrac,
                "train/critic_grad_norm": norm,
            }
        return told
