"""Log-probs and entropies of tokens from logits, over the support of each token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from oppo.support import Support


@dataclass(frozen=True, slots=True, eq=False)
class SupportIndex:
    """Indices of the supports of T tokens in their logits [T, V]; int64, on the device of the logits.

    Attributes:
        narrow: [A], the tokens drawn from exactly their listed ids.
        kept: [3, S], for each of those ids its row in ``narrow``, its position in that row and the id.
        width: largest number of ids of a narrow token.
        wide: [B], the tokens drawn from all but their listed ids.
        barred: [2, S'], for each of those ids its row in ``wide`` and the id.
        free: whether any token was drawn from the whole vocabulary.
    """

    narrow: Tensor
    kept: Tensor
    width: int
    wide: Tensor
    barred: Tensor
    free: bool

    @classmethod
    def of(cls, support: Support, device: torch.device) -> SupportIndex | None:
        """Return the indices of a support; ``None`` if every token was drawn from the whole vocabulary."""
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

    ``logsumexp`` and one gather: the forward pass in float32 keeps no second tensor of the logits' size.

    Args:
        logits: float [..., V]; [T, V] with a support.
        tokens: int64 [...].
        temperature: divides the logits; 0, greedy decoding, counts as 1.
        support: normalises over the support of each token; ``None``: over the vocabulary.
    """
    scaled = _scaled(logits, temperature)
    chosen = scaled.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return chosen - (_normaliser(scaled) if support is None else support.each(scaled, _normaliser))


def entropies(logits: Tensor, temperature: float = 1.0, support: SupportIndex | None = None) -> Tensor:
    """Return the entropy of each next-token distribution: float32 [T], nats.

    Args:
        logits: float [T, V].
        temperature: divides the logits; 0 counts as 1.
        support: ids outside have probability 0, as in :func:`token_logprobs`.
    """
    scaled = _scaled(logits, temperature)
    return _entropies(scaled) if support is None else support.each(scaled, _entropies)


def _normaliser(scaled: Tensor) -> Tensor:
    return scaled.logsumexp(-1)


def _entropies(scaled: Tensor) -> Tensor:
    probabilities = scaled.softmax(-1)
    # A token of probability 0 adds nothing, though its logit may be minus infinity: 0 * inf would be NaN.
    return scaled.logsumexp(-1) - (probabilities * torch.where(probabilities > 0, scaled, 0.0)).sum(-1)


def _scaled(logits: Tensor, temperature: float) -> Tensor:
    scaled = logits.float()
    return scaled if temperature in {0.0, 1.0} else scaled / temperature
