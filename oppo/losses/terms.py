"""The terms of a loss: log-probs and entropies from logits, and pure functions of flat tensors, without padding.

Every function takes the count of the whole minibatch as ``total`` and divides by it, so that the results of its
micro-batches add up to the results of the whole, and so do their gradients.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, assert_never

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from oppo.events import Support
from oppo.returns import KLEstimator
from oppo.training import Surrogate

DUAL_CLIP: Final = 3.0
GATES: Final = (1.0, 1.05)


@dataclass(frozen=True, slots=True, eq=False)
class SupportIndex:
    """Indices of the supports of T tokens in their logits [T, V]; int64, on the device of the logits.

    Attributes:
        narrow: [A], the tokens sampled from exactly their listed ids.
        kept: [3, S], for each of those ids its row in ``narrow``, its position in that row and the id.
        width: largest number of ids of a narrow token.
        wide: [B], the tokens sampled from all but their listed ids.
        barred: [2, S'], for each of those ids its row in ``wide`` and the id.
        free: whether any token was sampled from the whole vocabulary.
    """

    narrow: Tensor
    kept: Tensor
    width: int
    wide: Tensor
    barred: Tensor
    free: bool

    @classmethod
    def of(cls, support: Support, device: torch.device) -> SupportIndex | None:
        """Return the indices of a support; ``None`` if every token was sampled from the whole vocabulary."""
        if support.empty:
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
        """Return ``measure``, a function of rows of logits [n, m] to [n], of each token's distribution: float [T].

        Logits outside a support are the lowest float32, not minus infinity: their probability is 0, and so is 0 times
        the logit. Only the ids of ``narrow`` and the rows of ``wide`` are copied.
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

    Args:
        logits: float [..., V]; [T, V] with a support.
        tokens: int64 [...].
        temperature: divides the logits; 0, greedy decoding, counts as 1.
        support: normalises over the support of each token; ``None``: over the vocabulary.
    """
    scaled = _scaled(logits, temperature)
    if support is None:  # fewer passes over the vocabulary than one to normalise, and one to take what was sampled
        return -cross_entropy(scaled.flatten(0, -2), tokens.flatten(), reduction="none").view(tokens.shape)
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - support.each(scaled, lambda logits: logits.logsumexp(-1))


def top_logprobs(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-probs of k ids at each token, and of all other ids together: float32 [T, k + 1], nats.

    They are over the whole vocabulary. What is impossible has the lowest float32, not minus infinity: its probability
    is 0, and so is 0 times its logarithm.

    Args:
        logits: float [T, V].
        ids: int64 [T, k], different ones at each token.
        temperature: divides the logits; 0 counts as 1.
    """
    scaled = _scaled(logits, temperature)
    lowest = torch.finfo(scaled.dtype).min
    others = scaled.scatter(-1, ids, lowest).logsumexp(-1, keepdim=True)
    return torch.cat((scaled.gather(-1, ids), others), -1).log_softmax(-1).clamp(min=lowest)


def divergences(logprobs: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """Return the divergence of each token's distribution from a teacher's: float32 [T], nats, not negative.

    With policy ``q`` and teacher ``p`` (Agarwal et al. 2024, arXiv 2306.13649, section 2 and equation 1)::

        beta 0   KL(p || q), forward
        beta 1   KL(q || p), reverse
        between  beta KL(p || m) + (1 - beta) KL(q || m), m = beta p + (1 - beta) q: generalised Jensen-Shannon

    Args:
        logprobs: float32 [T, K], of the policy, of K events that exclude each other, with gradient.
        teacher: float32 [T, K], of the teacher; NaN where it says nothing: the divergence is 0, without gradient.
        beta: 0 .. 1.
    """
    taught = ~teacher.isnan().any(-1)
    teacher = torch.where(taught[:, None], teacher, logprobs.detach())
    return torch.where(taught, _divergence(logprobs, teacher, beta), 0.0)


def _divergence(logprobs: Tensor, teacher: Tensor, beta: float) -> Tensor:
    if beta == 0:
        return _kl(teacher, logprobs)
    if beta == 1:
        return _kl(logprobs, teacher)
    mixed = torch.logaddexp(teacher + math.log(beta), logprobs + math.log1p(-beta))
    return beta * _kl(teacher, mixed) + (1.0 - beta) * _kl(logprobs, mixed)


def _kl(one: Tensor, other: Tensor) -> Tensor:
    return (one.exp() * (one - other)).sum(-1)


def entropies(logits: Tensor, temperature: float = 1.0, support: SupportIndex | None = None) -> Tensor:
    """Return the entropy of each next-token distribution: float32 [T], nats.

    Args:
        logits: float [T, V].
        temperature: divides the logits; 0 counts as 1.
        support: ids outside have probability 0, as in :func:`token_logprobs`.
    """
    scaled = _scaled(logits, temperature)
    return _entropies(scaled) if support is None else support.each(scaled, _entropies)


def _entropies(scaled: Tensor) -> Tensor:
    probabilities = scaled.softmax(-1)
    if not torch.is_grad_enabled() or not scaled.requires_grad:
        summands: Tensor = torch.special.entr(probabilities)
        return summands.sum(-1)
    # A token of probability 0 adds nothing, though its logit may be minus infinity: 0 * inf would be NaN.
    return scaled.logsumexp(-1) - (probabilities * torch.where(probabilities > 0, scaled, 0.0)).sum(-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.float()
    return scaled if temperature in {0.0, 1.0} else scaled / temperature


class PolicyTerm(NamedTuple):
    """The clipped policy loss of an update, and the means of its metrics without gradient."""

    loss: Tensor
    approxkl: Tensor
    clipfrac: Tensor
    ratio: Tensor


class PolicyLosses(NamedTuple):
    """The clipped policy loss of T tokens; only the loss has a gradient.

    Attributes:
        loss: float32 [T], to be minimised.
        approxkl: float32 [T], ``(log ratio)**2 / 2``.
        clipped: bool [T], the tokens whose clipped loss is the larger one, so that they have no gradient.
        ratio: float32 [T], current over old probability; 1 outside of the mask.
    """

    loss: Tensor
    approxkl: Tensor
    clipped: Tensor
    ratio: Tensor

    def term(self, loss: Tensor, mask: Tensor, total: float) -> PolicyTerm:
        """Return ``loss``, a scalar that was made of the tokens' losses, with the means of their metrics."""
        clipped = self.clipped.to(self.ratio.dtype)
        metrics = [masked_mean(each, mask, total) for each in (self.approxkl, clipped, self.ratio)]
        return PolicyTerm(loss, *metrics)


class ValueTerm(NamedTuple):
    """The clipped value loss, and the share of tokens whose clipped loss is the larger one."""

    loss: Tensor
    clipfrac: Tensor


def masked_mean(x: Tensor, mask: Tensor, total: float | None = None) -> Tensor:
    """Return the sum of ``x`` where ``mask`` is true, divided by ``total``: by default the mask's own count.

    Masked entries do not count, NaN included.

    Args:
        x: float [T].
        mask: bool [T].
        total: tokens of the whole minibatch.

    Raises:
        ValueError: the mask is empty without a ``total``, or ``total`` is not positive.
    """
    count = float(mask.sum()) if total is None else total
    if count <= 0:
        raise ValueError("a mean over no token is undefined: leave out rows without a sampled token")
    return torch.where(mask, x, torch.zeros_like(x)).sum() / count


def policy_losses(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    surrogate: Surrogate,
    *,
    weights: Tensor | None = None,
) -> PolicyLosses:
    """Return the surrogate loss of each token, times its weight, with its metrics.

    Args:
        logprobs: float32 [T], current, with gradient.
        old_logprobs: float32 [T], of the policy that sampled the tokens, or of the one before the update.
        advantages: float32 [T].
        mask: bool [T], the tokens that count.
        surrogate: see :func:`surrogate_losses`.
        weights: float32 [T], of :class:`oppo.returns.ImportanceCorrection`; 1 by default. Of weight 0: loss 0, ratio 1.
    """
    weighted = mask if weights is None else mask & (weights > 0)
    difference = torch.where(weighted, logprobs - old_logprobs, torch.zeros_like(logprobs))
    old = torch.where(weighted, old_logprobs, torch.zeros_like(old_logprobs))
    losses, clipped = surrogate_losses(surrogate, difference, old, advantages)
    return PolicyLosses(
        losses if weights is None else weights * losses,
        approxkl=0.5 * difference.detach().square(),
        clipped=mask & clipped,
        ratio=difference.detach().exp(),
    )


def surrogate_losses(
    surrogate: Surrogate, difference: Tensor, old: Tensor, advantages: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of each token, float32 [T], and whether it is clipped, bool [T].

    With the ratio ``r = exp(difference)``, advantage A and the band ``1 - low .. 1 + high``::

        clip       max(-A r, -A clamp(r, band))              Schulman et al. 2017, arXiv 1707.06347, equation 7; a band
                                                             of two widths: Yu et al. 2025, arXiv 2503.14476, 3.1
        dual_clip  the same, at most -A dual_clip if A < 0   Ye et al. 2020, arXiv 1912.09729, equation 5
        cispo      -A stop(clamp(r, band)) log pi            MiniMax 2025, arXiv 2506.13585, equation 4
        sapo       -A 4 / tau sigmoid(tau (r - 1))           Gao et al. 2025, arXiv 2511.20347; tau by the sign of A
        dppo_tv    -A r, but 0 where the probability has     Qi et al. 2026, arXiv 2602.04879; the mask has no gradient
                   moved by more than high in the direction of A > 0, or low in that of A < 0

    Args:
        difference: float32 [T], current log-probs minus old ones, with gradient.
        old: float32 [T], old log-probs.
        advantages: float32 [T].
    """
    ratio, (low, high) = difference.exp(), surrogate.band
    plain = -advantages * ratio
    match surrogate.kind:
        case "clip" | "dual_clip":
            losses = torch.maximum(plain, -advantages * ratio.clamp(1.0 - low, 1.0 + high))
            clipped = losses > plain
            if surrogate.kind == "dual_clip":
                most = -advantages * (DUAL_CLIP if surrogate.dual_clip is None else surrogate.dual_clip)
                bounded = (advantages < 0) & (losses > most)
                losses, clipped = torch.where(bounded, most, losses), clipped | bounded
            return losses, clipped
        case "cispo":
            weight = ratio.detach().clamp(1.0 - low, 1.0 + high)
            return -advantages * weight * (difference + old), weight != ratio.detach()
        case "sapo":
            above, below = surrogate.gates or GATES
            tau = torch.full_like(advantages, below).masked_fill(advantages > 0, above)
            return -advantages * 4.0 / tau * torch.sigmoid(tau * (ratio - 1.0)), torch.zeros_like(
                ratio, dtype=torch.bool
            )
        case "dppo_tv":
            moved = (difference.detach() + old).exp() - old.exp()
            masked = torch.where(advantages > 0, moved > high, (advantages < 0) & (moved < -low))
            return torch.where(masked, 0.0, plain), masked
        case _:
            assert_never(surrogate.kind)


def value_loss(
    values: Tensor,
    old_values: Tensor,
    returns: Tensor,
    mask: Tensor,
    clip: float,
    *,
    total: float | None = None,
) -> ValueTerm:
    """Return the clipped value loss of TRL: half the mean of the larger of two squared errors.

    The second error is of the value clamped to ``old_values - clip .. old_values + clip``.

    Args:
        values: float32 [T], current, with gradient.
        old_values: float32 [T], of the time when the advantages were estimated.
        returns: float32 [T].
        mask: bool [T], the tokens that count.
        clip: distance from the old value beyond which a value has no gradient; ``inf``: no bound.
        total: see :func:`masked_mean`.
    """
    counted = torch.where(mask, values, torch.zeros_like(values))
    plain = (counted - returns).square()
    clipped = (counted.clamp(old_values - clip, old_values + clip) - returns).square()
    loss = 0.5 * masked_mean(torch.maximum(plain, clipped), mask, total)
    with torch.no_grad():
        return ValueTerm(loss, clipfrac=masked_mean((clipped > plain).to(values.dtype), mask, total))


def kl_losses(logprobs: Tensor, reference: Tensor, mask: Tensor, estimator: KLEstimator) -> Tensor:
    """Return an estimate of KL(policy || reference) for each token, as a loss: float32 [T], nats; 0 outside the mask.

    The estimators are as in :func:`oppo.returns.kl_estimate`. In expectation over tokens of the current policy,
    the gradient of ``k2`` is that of the KL, that of ``k3`` is close to it near the reference, and that of ``k1`` is
    zero.

    Args:
        logprobs: float32 [T], current, with gradient.
        reference: float32 [T], of the reference model.
        mask: bool [T], the tokens that count.
        estimator: ``k1``, ``k2`` or ``k3``.
    """
    difference = torch.where(mask, reference - logprobs, torch.zeros_like(logprobs))
    match estimator:
        case "k1":
            return -difference
        case "k2":
            return 0.5 * difference.square()
        case "k3":
            return torch.expm1(difference) - difference
        case _:
            assert_never(estimator)
