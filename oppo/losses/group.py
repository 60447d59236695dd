"""Losses over groups and whole responses: GSPO's clipped ratio, and DPO on pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from oppo.declared import Positive, validated
from oppo.errors import ConfigError
from oppo.losses.base import Divisor, Input, Inputs, LossValue, Unit, means
from oppo.losses.ppo import ClippedLoss
from oppo.losses.terms import PolicyTerm, surrogate_losses
from oppo.returns import ImportanceCorrection
from oppo.training import Aggregation, Surrogate


@dataclass(frozen=True, kw_only=True)
class SequenceLoss(ClippedLoss):
    """GSPO's clipped surrogate (Zheng et al. 2025, arXiv 2507.18071, equations 5 and 7); otherwise a ``ClippedLoss``.

    The ratio of a response is the geometric mean of its tokens', ``exp(mean(log pi - log pi_old))``, and its advantage
    the mean of theirs; an agent has one of each conversation. The loss is a mean over responses, and so is a KL. The
    ratio moves much less than a token's, hence the clip.

    Raises:
        ConfigError: a value is out of range, or stale tokens are corrected for one by one.
    """

    surrogate: Literal["clip"] = "clip"
    clip: Positive = 3e-4
    clip_high: Positive | None = 4e-4
    aggregation: Aggregation = "responses"
    correction: ImportanceCorrection = field(default_factory=lambda: ImportanceCorrection(level="sequence"))
    of_rows: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.correction.weight != "none" and self.correction.level == "token":
            raise ConfigError(
                "the ratio of GSPO is that of a whole response, and so is the weight of a stale one: expected "
                f"ImportanceCorrection(level='sequence'), got level={self.correction.level!r}"
            )

    @property
    def unit(self) -> Unit:
        return "row"

    def policy_term(self, inputs: Inputs, weights: Tensor | None) -> tuple[PolicyTerm, Tensor]:
        """Return the surrogate of the responses, and the tokens of the responses that it clips, bool [T]."""
        difference = inputs.row_means(inputs["logprobs"] - inputs[self.correction.ratio_base])
        weight = torch.ones_like(difference) if weights is None else inputs.row_means(weights)
        difference = torch.where(weight > 0, difference, torch.zeros_like(difference))
        ratio = difference.exp()
        advantages = inputs.row_means(inputs["advantages"])
        each, beyond = surrogate_losses(Surrogate.of(self), difference, torch.zeros_like(difference), advantages)
        losses = weight * each
        loss = inputs.mean(losses[inputs.rows], self.aggregation)
        with torch.no_grad():
            term = PolicyTerm(
                loss,
                approxkl=inputs.row_mean(0.5 * difference.square()),
                clipfrac=inputs.row_mean(beyond.to(ratio.dtype)),
                ratio=inputs.row_mean(ratio),
            )
            return term, inputs.mask & beyond[inputs.rows]


@dataclass(frozen=True, kw_only=True)
@validated(ConfigError)
class PairwiseLoss:
    """DPO's loss (Rafailov et al. 2023, arXiv 2305.18290, equation 7) on the two responses to each prompt.

    ``-log sigmoid(beta * (gain of the better - gain of the worse))``, a mean over pairs; the gain of a response is the
    sum of ``log pi - log reference`` over its tokens. The score of the reward says which one is better; a pair of equal
    scores has loss 0, and so has one of which a response is left out of the loss.

    Attributes:
        beta: how much the policy is held to the reference.

    Raises:
        ConfigError: beta is not positive, or a batch has other groups than pairs.
    """

    unit: ClassVar[Unit] = "group"
    divisor: ClassVar[Divisor] = "groups"
    reads: ClassVar[frozenset[Input]] = frozenset({"logprobs", "reference", "scores"})
    measures: ClassVar[frozenset[Input]] = frozenset()

    beta: Positive = 0.1

    def __call__(self, inputs: Inputs) -> LossValue:
        sizes = inputs.groups.unique_consecutive(return_counts=True)[1]
        if (sizes > 2).any():
            raise ConfigError(
                "PairwiseLoss compares two responses to each prompt: give the recipe samples=2, and agents that hold "
                "one conversation"
            )
        paired = sizes.repeat_interleave(sizes) == 2
        gains = inputs.row_sums(inputs["logprobs"] - inputs["reference"])[paired].reshape(-1, 2)
        order = inputs["scores"][paired].reshape(-1, 2).diff(dim=1)[:, 0].sign()
        margins = self.beta * order * gains.diff(dim=1)[:, 0]
        pairs = inputs.whole.groups
        loss = -(order.abs() * logsigmoid(margins)).sum() / pairs
        with torch.no_grad():
            right = (margins > 0).to(margins.dtype).sum() / pairs
            return LossValue(
                loss,
                {
                    "loss/policy_avg": loss,
                    "policy/margin_avg": margins.sum() / pairs,
                    "policy/ranked_right_avg": right,
                },
            )

    def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
        return means(minibatches)
