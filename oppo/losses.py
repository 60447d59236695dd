"""The losses of PPO as pure functions on flat tensors, one entry per response token, padding nowhere.

A mean over a minibatch that is computed in parts must divide each part by the whole minibatch's count: every function
takes that count as ``total``, and then the parts' results (and their gradients) add up to the whole's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, assert_never

import numpy as np
import torch
from torch import Tensor

from oppo.estimators import KLEstimator
from oppo.support import Support


class PolicyLoss(NamedTuple):
    """The clipped policy loss and what it says of the update; scalars.

    Attributes:
        loss: to be minimised.
        approxkl: mean of ``(log ratio)**2 / 2``, without gradient.
        clipfrac: share of tokens whose clipped loss is the larger one, without gradient.
        ratio: mean of current over old probability, without gradient.
    """

    loss: Tensor
    approxkl: Tensor
    clipfrac: Tensor
    ratio: Tensor


class ValueLoss(NamedTuple):
    """The clipped value loss; scalars.

    Attributes:
        loss: to be minimised.
        clipfrac: share of tokens whose clipped loss is the larger one, without gradient.
    """

    loss: Tensor
    clipfrac: Tensor


def masked_mean(x: Tensor, mask: Tensor, total: float | None = None) -> Tensor:
    """Return the sum of ``x`` where ``mask`` is true, over ``total``: the mask's own count unless given.

    What the mask leaves out does not count, whatever it is; a NaN there does no harm.

    Args:
        x: float [T].
        mask: bool [T].
        total: tokens of the whole of which this is a part.

    Raises:
        ValueError: the mask is empty and no ``total`` was given, or ``total`` is not positive.
    """
    count = float(mask.sum()) if total is None else total
    if count <= 0:
        raise ValueError("a mean over no token is undefined: leave out rows of which nothing was sampled")
    return torch.where(mask, x, torch.zeros_like(x)).sum() / count


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    clip: float,
    *,
    weights: Tensor | None = None,
    total: float | None = None,
) -> PolicyLoss:
    """Return PPO's clipped surrogate loss (Schulman et al. 2017, arXiv 1707.06347, equation 7), negated.

    ``mean(w * max(-A * ratio, -A * clamp(ratio, 1 - clip, 1 + clip)))``, ``ratio = exp(logprobs - old_logprobs)``.

    Args:
        logprobs: float32 [T], current, with gradient.
        old_logprobs: float32 [T], of the policy that sampled the tokens, or of the one before the update.
        advantages: float32 [T].
        mask: bool [T], the tokens that count.
        clip: half-width of the band in which the ratio may move.
        weights: float32 [T], see :mod:`oppo.staleness`; 1 unless given. A token of weight 0 counts as one of loss 0
            that has not moved, whatever its numbers are.
        total: see :func:`masked_mean`.
    """
    learnt = mask if weights is None else mask & (weights > 0)
    difference = torch.where(learnt, logprobs - old_logprobs, torch.zeros_like(logprobs))
    ratio = difference.exp()
    plain, clipped = _surrogates(ratio, advantages, clip)
    each = torch.maximum(plain, clipped)
    loss = masked_mean(each if weights is None else weights * each, mask, total)
    with torch.no_grad():
        return PolicyLoss(
            loss,
            approxkl=masked_mean(0.5 * difference.square(), mask, total),
            clipfrac=masked_mean((clipped > plain).to(ratio.dtype), mask, total),
            ratio=masked_mean(ratio, mask, total),
        )


@torch.no_grad()
def clipped_tokens(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip: float) -> Tensor:
    """Return the tokens whose clipped loss is the larger one, so that they teach nothing: bool [T]."""
    plain, clipped = _surrogates((logprobs - old_logprobs).exp(), advantages, clip)
    return mask & (clipped > plain)


def _surrogates(ratio: Tensor, advantages: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, without and with the clip: float32 [T] each."""
    return -advantages * ratio, -advantages * ratio.clamp(1.0 - clip, 1.0 + clip)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float,
    *,
    total: float | None = None,
) -> ValueLoss:
    """Return the clipped value loss of TRL: half the mean of the larger of two squared errors.

    The second error is that of the value clamped to ``old_values - clip .. old_values + clip``.

    Args:
        values: float32 [T], current, with gradient.
        old_values: float32 [T], as they were when the advantages were estimated.
        returns: float32 [T].
        mask: bool [T], the tokens that count.
        clip: how far a value may move from its old one before its gradient ends; ``inf``: as far as it likes.
        total: see :func:`masked_mean`.
    """
    counted = torch.where(mask, values, torch.zeros_like(values))
    plain = (counted - returns).square()
    clipped = (counted.clamp(old_values - clip, old_values + clip) - returns).square()
    loss = 0.5 * masked_mean(torch.maximum(plain, clipped), mask, total)
    with torch.no_grad():
        return ValueLoss(loss, clipfrac=masked_mean((clipped > plain).to(values.dtype), mask, total))


def kl_loss(
    logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: KLEstimator, *, total: float | None = None
) -> Tensor:
    """Return the mean estimate of KL(policy || reference) as a loss: a float32 scalar, nats per token.

    The estimators are those of :func:`oppo.estimators.kl_estimate`. As a loss it is their gradient that counts: on
    tokens of the current policy that of ``k2`` is the gradient of the KL in expectation, that of ``k3`` is close to it
    near the reference, and that of ``k1`` is zero in expectation: it pulls nowhere.

    Args:
        logprobs: float32 [T], current, with gradient.
        reference: float32 [T], of the reference model.
        mask: bool [T], the tokens that count.
        estimator: ``k1``, ``k2`` or ``k3``.
        total: see :func:`masked_mean`.
    """
    difference = torch.where(mask, reference - logprobs, torch.zeros_like(logprobs))
    match estimator:
        case "k1":
            estimate = -difference
        case "k2":
            estimate = 0.5 * difference.square()
        case "k3":
            estimate = torch.expm1(difference) - difference
        case _:
            assert_never(estimator)
    return masked_mean(estimate, mask, total)


@dataclass(frozen=True, slots=True, eq=False)
class SupportIndex:
    """Where the supports of T tokens lie in their logits [T, V]; int64, on the device of the logits.

    Attributes:
        narrow: [A], the tokens that were one of exactly their ids, with ``width`` the most that one of them has.
        kept: [3, S], for each of those ids its row among ``narrow``, its place in that row and the id.
        wide: [B], the tokens that were any but their ids.
        barred: [2, S'], for each of those ids its row among ``wide`` and the id.
        free: whether there are others: tokens that were any.
    """

    narrow: Tensor
    kept: Tensor
    width: int
    wide: Tensor
    barred: Tensor
    free: bool

    @classmethod
    def of(cls, support: Support, device: torch.device) -> SupportIndex | None:
        """Return where the support of some tokens lies; ``None`` where nothing was left out."""
        if support.whole:
            return None
        sizes, exact, lacking = np.abs(support.counts.astype(np.int64)), support.counts > 0, support.counts < 0
        row = np.where(exact, exact.cumsum(), lacking.cumsum()) - 1
        owner = np.repeat(np.arange(len(sizes)), sizes)
        place = np.arange(len(support.ids)) - np.repeat(sizes.cumsum() - sizes, sizes)
        listed, kept = np.stack((row[owner], place, support.ids)), exact[owner]
        narrow, three, wide, two = (
            torch.from_numpy(array).to(device)
            for array in (exact.nonzero()[0], listed[:, kept], lacking.nonzero()[0], listed[::2, ~kept])
        )
        return cls(narrow, three, int(sizes[exact].max(initial=0)), wide, two, free=not (exact | lacking).all())

    def each(self, logits: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
        """Return ``measure`` of each token's distribution, float [T], given that of rows of logits, [n, m] to [n].

        What is outside of a support is at the lowest float32, not at minus infinity: its probability is 0 all the same,
        and 0 times it too. Of the logits only the ids of ``narrow`` and the rows of ``wide`` are copied.
        """
        lowest = torch.finfo(logits.dtype).min
        measured = measure(logits) if self.free else logits.new_zeros(len(logits))
        if len(self.narrow):
            row, place, ids = self.kept
            table = logits.new_full((len(self.narrow), self.width), lowest)
            table = table.index_put((row, place), logits[self.narrow[row], ids])
            measured = measured.index_put((self.narrow,), measure(table))
        if len(self.wide):
            row, ids = self.barred
            table = logits[self.wide].index_put((row, ids), logits.new_tensor(lowest))
            measured = measured.index_put((self.wide,), measure(table))
        return measured


def token_logprobs(
    logits: Tensor, tokens: Tensor, temperature: float = 1.0, support: SupportIndex | None = None
) -> Tensor:
    """Return the log-prob of each token: float32 [...], nats.

    ``logsumexp`` and one gather: no second tensor of the logits' size is kept for the forward pass in float32.

    Args:
        logits: float [..., V]; [T, V] with a support.
        tokens: int64 [...].
        temperature: divides the logits; 0, which is greedy decoding, counts as 1.
        support: normalise over what each token was drawn from; ``None``: over the vocabulary.
    """
    scaled = _scaled(logits, temperature)
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - (_normaliser(scaled) if support is None else support.each(scaled, _normaliser))


def entropy(
    logits: Tensor,
    mask: Tensor,
    temperature: float = 1.0,
    support: SupportIndex | None = None,
    *,
    total: float | None = None,
) -> Tensor:
    """Return the mean entropy of the next-token distributions: a float32 scalar, nats.

    Args:
        logits: float [T, V].
        mask: bool [T], the positions that count.
        temperature: divides the logits; 0 counts as 1.
        support: what is outside has probability 0, as in :func:`token_logprobs`.
        total: see :func:`masked_mean`.
    """
    scaled = _scaled(logits, temperature)
    each = _entropies(scaled) if support is None else support.each(scaled, _entropies)
    return masked_mean(each, mask, total)


def _normaliser(scaled: Tensor) -> Tensor:
    return scaled.logsumexp(-1)


def _entropies(scaled: Tensor) -> Tensor:
    return scaled.logsumexp(-1) - (scaled.softmax(-1) * scaled).sum(-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.float()
    return scaled if temperature in {0.0, 1.0} else scaled / temperature
