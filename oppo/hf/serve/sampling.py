"""Drawing tokens: the argmax of logits plus Gumbel noise, over the ids that truncation keeps.

``argmax(logits + g)`` with independent standard Gumbel ``g`` is a sample from ``softmax(logits)`` (Gumbel, 1954;
Maddison et al., 2014, "A* sampling"). Unlike inverting a cumulative sum it is robust: an error of 1e-6 in one logit
changes the token only where the two best perturbed logits nearly tie, so the same noise gives the same tokens under
another batch shape, chunking or device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oppo.models import Sampling

_NUCLEUS = 1024
"""Tokens among which the nucleus of ``top_p`` is searched first: sorting a whole vocabulary is slow."""


class DeviceSupport(NamedTuple):
    """An :class:`oppo.support.Support` on the device of the logits.

    Attributes:
        ids: int32 [S].
        counts: int32 [n]; above 0, the token was one of so many ids; below 0, any but so many; 0: any id.
    """

    ids: Tensor
    counts: Tensor


class Drawn(NamedTuple):
    """Tokens, int64 [n], their log-probs, float32 [n], and their support: ``None`` if no id was left out."""

    tokens: Tensor
    logprobs: Tensor
    support: DeviceSupport | None


class _Kept(NamedTuple):
    """The largest logits of each row, descending, float32 [n, k]; minus infinity outside of what truncation keeps.

    Attributes:
        ids: int64 [n, k].
        normaliser: float32 [n, 1], the logsumexp of the logits kept.
    """

    logits: Tensor
    ids: Tensor
    normaliser: Tensor

    def support(self) -> DeviceSupport:
        kept = self.logits > -torch.inf
        return DeviceSupport(self.ids[kept].int(), kept.sum(-1, dtype=torch.int32))


def draw(logits: Tensor, noise: Tensor | None, sampling: Sampling, too_short: Tensor | None = None) -> Drawn:
    """Return the tokens drawn from ``logits`` with ``noise``, their log-probs and their support.

    A log-prob is of the distribution that the token was drawn from: at the sampling temperature (1 when greedy),
    truncated and renormalised.

    Args:
        logits: [n, V], of any floating type; the arithmetic is float32.
        noise: float32 [n, V], standard Gumbel; ``None`` only when the temperature is 0.
        sampling: temperature, then ``top_k``, then ``top_p``, as in transformers' ``generate``.
        too_short: bool [n], the rows that must not end yet: no token of ``sampling.stop`` is drawn for them; ``None``:
            no row.

    Raises:
        ValueError: the temperature is above 0 and ``noise`` is ``None``.
    """
    logits = logits.float()
    if sampling.temperature == 0:
        noise = None
    elif noise is None:
        raise ValueError(f"sampling at temperature {sampling.temperature} needs noise; only greedy decoding has none")
    else:
        logits = logits / sampling.temperature
    support = None
    if too_short is not None:
        logits, support = _without_stop(logits, too_short, sampling.stop)
    kept = _kept(logits, sampling)
    if noise is None or kept is None:
        tokens = (logits if noise is None else logits + noise).argmax(-1, keepdim=True)
        normaliser = logits.logsumexp(-1, keepdim=True)
    else:
        choice = (kept.logits + noise.gather(1, kept.ids)).argmax(-1, keepdim=True)
        tokens, normaliser, support = kept.ids.gather(1, choice), kept.normaliser, kept.support()
    logprobs = (logits.gather(1, tokens) - normaliser).clamp_(max=0)  # rounding can leave it above 0
    return Drawn(tokens.squeeze(1), logprobs.squeeze(1), support)


def _without_stop(logits: Tensor, too_short: Tensor, stop: Sequence[int]) -> tuple[Tensor, DeviceSupport]:
    """Return ``logits``, minus infinity for stop tokens in the rows that must not end yet, and the support left."""
    within = sorted({token for token in stop if token < logits.shape[-1]})
    ends = torch.tensor(within, dtype=torch.int32, device=logits.device)
    barred = torch.zeros(logits.shape[-1], dtype=torch.bool, device=logits.device)
    barred[ends.long()] = True
    allowed = logits.masked_fill(too_short.unsqueeze(1) & barred, -torch.inf)
    return allowed, DeviceSupport(ends.repeat(int(too_short.sum())), too_short.int().mul_(-len(ends)))


def _kept(logits: Tensor, sampling: Sampling) -> _Kept | None:
    """Return what ``top_k`` and ``top_p`` keep; ``None`` if they keep every id, or decoding is greedy."""
    if sampling.temperature == 0 or (not 0 < sampling.top_k < logits.shape[-1] and sampling.top_p == 1):
        return None
    if not sampling.top_k:
        return _nucleus(logits, sampling.top_p)
    best, ids = logits.topk(min(sampling.top_k, logits.shape[-1]), dim=-1)
    if sampling.top_p < 1:
        best = _until(best, best.softmax(-1), sampling.top_p)[0]
    return _Kept(best, ids, best.logsumexp(-1, keepdim=True))


def _nucleus(logits: Tensor, top_p: float) -> _Kept:
    vocabulary, total = logits.shape[-1], logits.logsumexp(-1, keepdim=True)
    width = min(_NUCLEUS, vocabulary)
    best, ids = logits.topk(width, dim=-1)
    if width < vocabulary and bool(((best - total).exp().sum(-1) < top_p).any()):
        best, ids = logits.sort(-1, descending=True)
    best, mass = _until(best, (best - total).exp(), top_p)
    # No logsumexp of the best: its last bit would depend on their number, and so on the other rows.
    return _Kept(best, ids, total + mass.log())


def _until(best: Tensor, probabilities: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Return ``best``, minus infinity where larger logits already have ``top_p`` of the mass, and the mass kept."""
    mass = probabilities.cumsum(-1)
    stays = mass - probabilities < top_p
    return best.masked_fill(~stays, -torch.inf), mass.gather(1, (stays.sum(-1, keepdim=True) - 1).clamp_(min=0))
