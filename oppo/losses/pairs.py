"""The loss of DPO on pairs of responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from oppo.declared import Positive, require_declared
from oppo.errors import ConfigError
from oppo.losses.protocol import Divisor, Input, Inputs, LossValue, Unit, means


@dataclass(frozen=True, kw_only=True)
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

    beta: Positive = 0.1

    def __post_init__(self) -> None:
        require_declared(self, error=ConfigError)

    @property
    def unit(self) -> Unit:
        """A group."""
        return "group"

    @property
    def divisor(self) -> Divisor:
        """The number of pairs."""
        return "groups"

    @property
    def reads(self) -> frozenset[Input]:
        """Log-probs of policy and reference, and the scores."""
        return frozenset({"logprobs", "reference", "scores"})

    @property
    def measures(self) -> frozenset[Input]:
        """Nothing else."""
        return frozenset()

    def __call__(self, inputs: Inputs) -> LossValue:
        """Return the loss of the pairs, with the mean margin and the share of pairs that the policy ranks right."""
        sizes = inputs.groups.unique_consecutive(return_counts=True)[1]
        if (sizes > 2).any():
            raise ConfigError("PairwiseLoss compares two responses to each prompt: give the recipe samples=2")
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
        """Return the means over minibatches."""
        return means(minibatches)
