"""How far an update's tokens have drifted from the weights that sampled them, by their age in versions.

Measured on what the trainer computes anyway: before its first optimizer step, the current log-prob of a token is its
proximal one. So the mismatch is that of the first minibatch, which is a random part of the batch (all of it where there
is one minibatch), and costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from oppo.hf.train.packing import MicroBatch
from oppo.losses import Evaluated

LAGS = ("0", "1", "2plus")
"""Tokens are counted by how many updates the weights have had since."""


class StalenessMetrics:
    """What the tokens of one update add up to; sums stay on the device until they are asked for.

    Args:
        version: of the weights that the update begins with.

    Attributes:
        opening: whether no optimizer step has been made since the update began.
    """

    def __init__(self, version: int) -> None:
        self._version = version
        self.opening = True
        self._clips = False
        self._by_lag: list[Tensor] = []
        self._mismatch: list[Tensor] = []

    @torch.no_grad()
    def add(self, part: MicroBatch, logprobs: Tensor, evaluated: Evaluated) -> None:
        """Take some tokens, their current log-probs, float32 [T], and what the loss says of them."""
        lag = (self._version - part.versions).clamp(0, len(LAGS) - 1)
        mine = (lag == torch.arange(len(LAGS), device=lag.device)[:, None]) & part.mask  # [L, T]
        clipped = torch.zeros_like(part.mask) if evaluated.clipped is None else evaluated.clipped
        self._clips = evaluated.clipped is not None
        self._by_lag.append(torch.stack((mine.sum(1), (mine & clipped).sum(1))))
        if self.opening:
            weights = torch.ones_like(logprobs) if evaluated.weights is None else evaluated.weights
            log = torch.where(part.mask, logprobs - part.behaviour, torch.zeros_like(logprobs)).double()
            stale, current, ratio = mine[1:].any(0), mine[0], log.exp()
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
            self._mismatch.append(torch.stack([one.double() for one in sums]))

    def metrics(self) -> dict[str, float]:
        """Return what was seen, under the names of ``metrics.jsonl``.

        ``policy/clipfrac_lag_k``: share of the tokens of that lag whose loss was clipped, where there are any, and the
        loss clips.
        ``mismatch/kl``: KL(behaviour || proximal), nats a token, by Schulman's k3 over stale tokens; 0 where there are
        none. ``mismatch/kl_current``: the same over tokens of the current version: what decoding and training compute
        differently, and what keys and values kept from older weights do. ``mismatch/ess``: effective sample size of the
        tokens as importance samples, ``sum(m)**2 / (n * sum(m**2))`` (Kong 1992), 1 where all are current.
        ``mismatch/weight`` and ``mismatch/masked``: mean weight of a token, and the share that is left out.
        """
        if not self._by_lag:
            return {}
        counted, clipped = torch.stack(self._by_lag).sum(0).tolist()
        told = {
            f"policy/clipfrac_lag_{lag}": hit / count
            for lag, count, hit in zip(LAGS, counted, clipped, strict=True)
            if count and self._clips
        }
        stale_kl, stale, current_kl, current, total, squares, weight, masked = (
            torch.stack(self._mismatch).sum(0).tolist()
        )
        tokens = stale + current
        return told | {
            "mismatch/kl": stale_kl / stale if stale else 0.0,
            "mismatch/kl_current": current_kl / current if current else 0.0,
            "mismatch/ess": total**2 / (tokens * squares) if tokens and squares else 0.0,
            "mismatch/weight": weight / tokens if tokens else 0.0,
            "mismatch/masked": masked / tokens if tokens else 0.0,
        }
