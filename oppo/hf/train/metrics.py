"""Metrics of one update: losses, gradient norms, the work done, and the staleness of its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from oppo.errors import ConfigError, shown
from oppo.hf.expert_routing import router_metrics
from oppo.hf.train.packing import MicroBatch
from oppo.hf.train.ranks import Team
from oppo.losses import Loss, LossValue
from oppo.losses.base import metrics_of
from oppo.report.metrics import taken

AUX = "loss/aux"

STALENESS = ("0", "1", "2plus")
"""Classes of tokens by staleness: versions between the weights that sampled a token and those trained now."""


class StalenessMetrics:
    """How far the tokens of an update have drifted from the weights that sampled them."""

    # Before the first optimizer step, a token's current log-prob is its proximal one. So the mismatch is measured on
    # the first minibatch, a random part of the batch, from what the trainer computes anyway. Sums stay on the device.

    def __init__(self, version: int) -> None:
        self._version = version
        self.first_minibatch = True
        self._clips = False
        self._by_class: list[Tensor] = []
        self._mismatch: list[Tensor] = []

    @torch.no_grad()
    def add(self, part: MicroBatch, logprobs: Tensor, evaluated: LossValue) -> None:
        staleness = (self._version - part.versions).clamp(0, len(STALENESS) - 1)
        classes = torch.arange(len(STALENESS), device=staleness.device)[:, None]
        by_class = (staleness == classes) & part.mask  # [3, T]
        clipped = torch.zeros_like(part.mask) if evaluated.clipped is None else evaluated.clipped
        self._clips = evaluated.clipped is not None
        self._by_class.append(torch.stack((by_class.sum(1), (by_class & clipped).sum(1))))
        if self.first_minibatch:
            weights = torch.ones_like(logprobs) if evaluated.weights is None else evaluated.weights
            log = torch.where(part.mask, logprobs - part.behaviour, torch.zeros_like(logprobs)).double()
            stale, current, ratio = by_class[1:].any(0), by_class[0], log.exp()
            divergence = torch.expm1(log) - log
            sums = (
                (stale * divergence).sum(),
                stale.sum(),
                (current * divergence).sum(),
                current.sum(),
                (part.mask * ratio).sum(),
                (part.mask * ratio.square()).sum(),
                (part.mask * weights).sum(),
                (part.mask & (weights == 0)).sum(),
            )
            self._mismatch.append(torch.stack([total.double() for total in sums]))

    def sum_over(self, team: Team) -> None:
        self._by_class = [team.sum(_sum(self._by_class, torch.zeros(2, len(STALENESS), dtype=torch.int64)))]
        self._mismatch = [team.sum(_sum(self._mismatch, torch.zeros(8, dtype=torch.float64)))]
        self._clips = bool(team.sum(torch.tensor(int(self._clips))))

    def metrics(self) -> dict[str, float]:
        if not self._by_class:
            return {}
        counts, clipped = torch.stack(self._by_class).sum(0).tolist()
        clipfrac = {
            f"policy/clipfrac_staleness_{versions}": hits / count
            for versions, count, hits in zip(STALENESS, counts, clipped, strict=True)
            if count and self._clips
        }
        stale_kl, stale, current_kl, current, total, squares, weight, masked = (
            torch.stack(self._mismatch).sum(0).tolist()
        )
        tokens = stale + current
        return clipfrac | {
            "mismatch/kl": stale_kl / stale if stale else 0.0,
            "mismatch/kl_current": current_kl / current if current else 0.0,
            "mismatch/ess": total**2 / (tokens * squares) if tokens and squares else 0.0,
            "mismatch/weight": weight / tokens if tokens else 0.0,
            "mismatch/masked": masked / tokens if tokens else 0.0,
        }


class Sums:
    """The loss of a minibatch and its metrics, added up over micro-batches and ranks."""

    def __init__(self) -> None:
        self._names: tuple[str, ...] = ()
        self._parts: list[Tensor] = []

    def add(self, evaluated: LossValue) -> None:
        self._names = tuple(evaluated.measured)
        self._parts.append(torch.stack((*evaluated.measured.values(), evaluated.loss)).detach())

    def over(self, team: Team) -> tuple[tuple[str, ...], Tensor]:
        names = tuple(team.first([*self._names]))
        return names, team.sum(_sum(self._parts, torch.zeros(len(names) + 1)))


@dataclass(slots=True)
class UpdateMetrics:
    loss: Loss
    staleness: StalenessMetrics
    measured: list[Mapping[str, float]] = field(default_factory=list)  # by the loss, of each minibatch that made a step
    norms: list[tuple[float, ...]] = field(default_factory=list)  # of actor and critic, before clipping
    stepped: set[int] = field(default_factory=set)  # rollouts of minibatches that made a step
    skipped: set[int] = field(default_factory=set)  # rollouts of the others
    minibatches_skipped: int = 0
    micro_batches: int = 0
    padding: int = 0
    tokens: int = 0
    loads: list[Tensor] = field(default_factory=list)

    def add(self, part: MicroBatch, logprobs: Tensor, evaluated: LossValue, loads: Tensor | None) -> None:
        self.loads += [] if loads is None else [loads]
        self.staleness.add(part, logprobs, evaluated)
        self.micro_batches += 1
        self.padding += part.padding
        self.tokens += part.ids.numel()

    def sum_over(self, team: Team) -> None:
        # Minibatches, norms and rollouts are the same in all ranks.
        work = torch.tensor([self.micro_batches, self.padding, self.tokens])
        self.micro_batches, self.padding, self.tokens = team.sum(work).tolist()
        self.staleness.sum_over(team)
        if shape := team.first([*self.loads[0].shape] if self.loads else []):
            self.loads = [team.sum(_sum(self.loads, torch.zeros(shape, dtype=torch.int64)))]

    def metrics(self) -> dict[str, float]:
        work = {
            "train/minibatches": float(len(self.measured)),
            "train/minibatches_skipped": float(self.minibatches_skipped),
            "train/micro_batches": float(self.micro_batches),
            "train/padding": self.padding / self.tokens if self.tokens else 0.0,
        }
        if not self.measured:
            return work
        routers = router_metrics(_sum(self.loads, torch.zeros(0))) if self.loads else {}
        if AUX in self.measured[0]:
            routers[AUX] = float(np.mean([each[AUX] for each in self.measured]))
        norms = zip(("train/grad_norm", "train/critic_grad_norm"), np.mean(self.norms, axis=0).tolist(), strict=False)
        own = metrics_of(self.loss, self.measured)
        for name in own:
            if fault := taken(str(name), f"{name!r} in metrics() of the loss {shown(self.loss)}", "Loss and policy"):
                raise ConfigError(fault)
        return work | self.staleness.metrics() | routers | dict(own) | dict(norms)


def _sum(tensors: Sequence[Tensor], none: Tensor) -> Tensor:
    return torch.stack(list(tensors)).sum(0) if tensors else none
