"""The loss of GSPO: a clipped ratio for each response instead of each token."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from oppo.declared import Positive
from oppo.errors import ConfigError
from oppo.losses.ppo import ClippedLoss
from oppo.losses.protocol import Inputs, Unit
from oppo.losses.terms import PolicyTerm, surrogates
from oppo.staleness import Correction
from oppo.training import Aggregation


@dataclass(frozen=True, kw_only=True)
class SequenceLoss(ClippedLoss):
    """GSPO's clipped surrogate (Zheng et al. 2025, arXiv 2507.18071, equations 5 and 7); otherwise a ``ClippedLoss``.

    The ratio of a response is the geometric mean of its tokens', ``exp(mean(log pi - log pi_old))``, and its advantage
    the mean of theirs. The loss is a mean over responses, and so is a KL. The ratio moves much less than a token's,
    hence the clip.

    Raises:
        ConfigError: a value is out of range, or stale tokens are corrected for one by one.
    """

    clip: Positive = 3e-4
    clip_high: Positive | None = 4e-4
    aggregation: Aggregation = "responses"
    correction: Correction = field(default_factory=lambda: Correction(level="sequence"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correction.weight != "none" and self.correction.level != "sequence":
            raise ConfigError(
                "the ratio of GSPO is that of a whole response, and so is the weight of a stale one: expected "
                f"Correction(level='sequence'), got level={self.correction.level!r}"
            )

    @property
    def unit(self) -> Unit:
        """A row."""
        return "row"

    def policy_term(self, inputs: Inputs, weights: Tensor | None) -> tuple[PolicyTerm, Tensor]:
        """Return the surrogate of the responses, and the tokens of those that it clips, bool [T]."""
        rows = inputs.whole.rows
        difference = inputs.row_means(inputs["logprobs"] - inputs[self.correction.ratio_base])
        weight = torch.ones_like(difference) if weights is None else inputs.row_means(weights)
        difference = torch.where(weight > 0, difference, torch.zeros_like(difference))
        ratio = difference.exp()
        plain, clipped = surrogates(ratio, inputs.row_means(inputs["advantages"]), self.clip, self.clip_high)
        losses = weight * torch.maximum(plain, clipped)
        loss = inputs.mean(losses[inputs.rows], self.aggregation)
        with torch.no_grad():
            beyond = clipped > plain
            term = PolicyTerm(
                loss,
                approxkl=(0.5 * difference.square()).sum() / rows,
                clipfrac=beyond.to(ratio.dtype).sum() / rows,
                ratio=ratio.sum() / rows,
            )
            return term, inputs.mask & beyond[inputs.rows]
