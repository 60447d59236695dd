"""Losses of the policy: PPO's, without and with a critic, GSPO's on whole responses, and DPO's on pairs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from oppo.declared import Fraction, Limit, NonNegative, Positive, validated
from oppo.errors import ConfigError
from oppo.losses.base import OF_A_CRITIC, Divisor, Input, Inputs, Loss, LossValue, Unit, means
from oppo.losses.terms import PolicyTerm, divergences, kl_losses, policy_losses, value_loss
from oppo.returns import ImportanceCorrection, KLEstimator
from oppo.training import CLIP, Aggregation, Surrogate, SurrogateKind


@dataclass(frozen=True, kw_only=True)
@validated(ConfigError)
class ClippedLoss:
    """PPO's clipped surrogate loss, an entropy bonus and a KL to the reference: the loss of GRPO and RLOO.

    The entropy bonus and each metric are means over the sampled tokens of a minibatch, and so is the rest of the loss
    unless ``aggregation`` says otherwise. Names and defaults are TRL 1.12's.

    Attributes:
        surrogate: how ratio and advantage of a token become its loss, see :func:`oppo.losses.surrogate_losses`.
        clip: the probability ratio has no gradient outside of ``1 - clip .. 1 + clip_high``.
        clip_high: as ``clip`` by default; a larger one lets unlikely tokens grow (DAPO: Yu et al. 2025, arXiv
            2503.14476, section 3.1).
        dual_clip, gates: of surrogates that read them, see :class:`oppo.training.Surrogate`.
        entropy_coefficient: weight of the entropy bonus.
        kl: weight of the KL to the reference in the loss; 0 if it is in the reward.
        kl_estimator: estimator of that KL; ``k2`` has the right gradient, see :func:`oppo.losses.kl_losses`.
        aggregation: how surrogate and KL of the tokens become one number, see :meth:`Inputs.mean`: GRPO's paper takes
            the mean of ``responses``, Dr. GRPO's the ``constant``, DAPO's that of ``tokens``.
        correction: of stale tokens.
        nll: weight of the negative log-likelihood of the responses whose score is above ``nll_above``, aggregated as
            the surrogate is, with 0 for the tokens of the others (VAPO: Yue et al. 2025, arXiv 2504.05118, section 4.4,
            which divides by the tokens of the former alone).
        distill: weight of the divergence from a teacher over its likeliest ids, aggregated as the surrogate is. Stale
            tokens have no other weight: it is of whole distributions, after what the policy wrote.
        distill_beta: which divergence, see :func:`oppo.losses.divergences`.

    Raises:
        ConfigError: a value is out of range, or the surrogate does not read it.
    """

    surrogate: SurrogateKind = "clip"
    clip: Positive = CLIP
    clip_high: Positive | None = None
    dual_clip: float | None = None
    gates: tuple[float, float] | None = None
    entropy_coefficient: NonNegative = 0.0
    kl: NonNegative = 0.0
    kl_estimator: KLEstimator = "k2"
    aggregation: Aggregation = "tokens"
    correction: ImportanceCorrection = field(default_factory=ImportanceCorrection)
    nll: NonNegative = 0.0
    nll_above: float = 0.0
    distill: NonNegative = 0.0
    distill_beta: Fraction = 1.0
    of_rows: ClassVar[bool] = False
    """Whether the ratio is a whole row's, the geometric mean over its tokens."""

    def __post_init__(self) -> None:
        Surrogate.of(self)

    @property
    def unit(self) -> Unit:
        """A token; a row if a token has the weight of its sequence, or responses are averaged first."""
        return "row" if self.correction.by_row or self.aggregation == "responses" else "token"

    @property
    def divisor(self) -> Divisor | None:
        """The divisor of the aggregation, unless there is an entropy bonus, which is a mean over tokens."""
        if self.aggregation == "tokens":
            return "tokens"
        return None if self.entropy_coefficient else "rows"

    @property
    def reads(self) -> frozenset[Input]:
        reads: set[Input] = {"logprobs", "advantages", self.correction.ratio_base}
        if self.correction.weighs:
            reads |= {"behaviour", "proximal"}
        if self.entropy_coefficient:
            reads.add("entropies")
        if self.kl:
            reads.add("reference")
        if self.nll:
            reads.add("scores")
        if self.distill:
            reads |= {"top_logprobs", "teacher_top"}
        return frozenset(reads)

    @property
    def measures(self) -> frozenset[Input]:
        """Entropy and KL, which are metrics without a weight too."""
        return frozenset[Input]({"entropies", "reference"}) - self.reads

    def __call__(self, inputs: Inputs) -> LossValue:
        weighs = self.correction.weighs
        weights = importance_weights(self.correction, inputs, of_rows=self.of_rows) if weighs else None
        policy, clipped = self.policy_term(inputs, weights)
        entropy = inputs.mean(inputs["entropies"])
        measured = {
            "loss/policy_avg": policy.loss,
            "policy/approxkl_avg": policy.approxkl,
            "policy/clipfrac_avg": policy.clipfrac,
            "policy/entropy_avg": entropy,
            "val/ratio": policy.ratio,
        }
        loss = policy.loss
        if self.entropy_coefficient:
            loss = loss - self.entropy_coefficient * entropy
        if self.nll:
            positive = (inputs["scores"] > self.nll_above)[inputs.rows]
            nll = torch.where(positive & inputs.mask, -inputs["logprobs"], 0.0)
            measured["loss/nll_avg"] = inputs.mean(nll, self.aggregation)
            loss = loss + self.nll * measured["loss/nll_avg"]
        if self.distill:
            divergence = divergences(inputs["top_logprobs"], inputs["teacher_top"], self.distill_beta)
            measured["loss/distill_avg"] = inputs.mean(divergence, self.aggregation)
            loss = loss + self.distill * measured["loss/distill_avg"]
        if "reference" in inputs:
            kl = kl_losses(inputs["logprobs"], inputs["reference"], inputs.mask, self.kl_estimator)
            measured["policy/kl_avg"] = inputs.mean(kl)
            if self.kl:
                loss = loss + self.kl * inputs.mean(kl, self.aggregation)
        return LossValue(loss, measured, clipped, weights)

    def policy_term(self, inputs: Inputs, weights: Tensor | None) -> tuple[PolicyTerm, Tensor]:
        """Return the surrogate, and the tokens that it clips, bool [T].

        ``weights``: importance weights of stale tokens, float32 [T].
        """
        each = policy_losses(
            inputs["logprobs"],
            inputs[self.correction.ratio_base],
            inputs["advantages"],
            inputs.mask,
            Surrogate.of(self),
            weights=weights,
        )
        loss = inputs.mean(each.loss, self.aggregation)
        return each.term(loss, inputs.mask, inputs.whole.tokens), each.clipped

    def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
        """Return the means over minibatches, and the variance of their mean ratios: 0 for one minibatch."""
        ratios = [measured["val/ratio"] for measured in minibatches]
        return means(minibatches) | {"val/ratio_var": float(np.var(ratios, ddof=1)) if len(ratios) > 1 else 0.0}


@dataclass(frozen=True, kw_only=True)
class PPOLoss(ClippedLoss):
    """The loss of PPO: the clipped policy loss, and the clipped value loss of the critic.

    Attributes:
        value_clip: distance from the old value beyond which a value has no gradient; ``inf``: no bound.
        value_coefficient: weight of the value loss.
    """

    value_clip: Limit = 0.2
    value_coefficient: NonNegative = 0.1

    @property
    def divisor(self) -> Divisor | None:
        """The number of tokens, by which the value loss is divided, if the policy loss is too."""
        return "tokens" if self.aggregation == "tokens" else None

    @property
    def reads(self) -> frozenset[Input]:
        return super().reads | OF_A_CRITIC

    def __call__(self, inputs: Inputs) -> LossValue:
        policy = super().__call__(inputs)
        values, old, returns = inputs["values"], inputs["old_values"], inputs["returns"]
        value = value_loss(values, old, returns, inputs.mask, self.value_clip, total=inputs.whole.tokens)
        measured = {**policy.measured, "loss/value_avg": value.loss, "val/clipfrac_avg": value.clipfrac}
        loss = policy.loss + self.value_coefficient * value.loss
        return LossValue(loss, measured, policy.clipped, policy.weights)


def default_loss(*, critic: bool) -> Loss:
    """Return PPO's loss with its defaults, with or without the value loss of a critic."""
    return PPOLoss() if critic else ClippedLoss()


@torch.no_grad()
def importance_weights(correction: ImportanceCorrection, inputs: Inputs, *, of_rows: bool = False) -> Tensor:
    """Return the importance weight of each token: float32 [T]; 0 if it is masked.

    See :class:`oppo.returns.ImportanceCorrection`. Computed in float64; a token that was not sampled has mismatch 1.

    Args:
        correction: of stale tokens.
        inputs: with ``behaviour`` and ``proximal``.
        of_rows: whether the weighed ratio is a whole row's, the geometric mean over its tokens.

    Example:
        >>> tokens = Inputs(
        ...     mask=torch.tensor([True, True]),
        ...     rows=torch.tensor([0, 0]),
        ...     groups=torch.tensor([0]),
        ...     whole=Whole(tokens=2, rows=1, groups=1, cap=2),
        ...     given={"behaviour": torch.zeros(2), "proximal": torch.tensor([1.0, 2.0]).log()},
        ... )
        >>> importance_weights(ImportanceCorrection(weight="truncated", cap=1.5), tokens).tolist()
        [1.0, 0.75]
    """
    if not correction.weighs:
        return torch.ones_like(inputs["behaviour"])
    difference = inputs["proximal"].double() - inputs["behaviour"].double()
    log = torch.where(inputs.mask, difference, torch.zeros_like(difference))
    k3 = log.new_zeros(()) if correction.k3 is None else inputs.row_means(torch.expm1(log) - log)[inputs.rows]
    own = log  # that the ratio over the behaviour policy contains already
    if correction.level == "sequence" or of_rows:
        own = inputs.row_means(log)[inputs.rows]
    if correction.level == "sequence":
        log = own
    elif correction.level == "product":
        log = inputs.row_sums(log)[inputs.rows]
    if correction.weight == "none":
        importance = own if correction.ratio_base == "behaviour" else torch.zeros_like(log)
    elif correction.weight == "truncated":
        importance = log.clamp(max=math.log(correction.cap))
    else:
        low, high = correction.band
        within = (log <= math.log(high)) & (log >= (math.log(low) if low else -math.inf))
        importance = log.masked_fill(~within, -math.inf)
    weights = (importance if correction.ratio_base == "proximal" else importance - own).exp()
    return (weights if correction.k3 is None else weights.masked_fill(k3 > correction.k3, 0.0)).float()


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
        each = policy_losses(
            difference,
            torch.zeros_like(difference),
            inputs.row_means(inputs["advantages"]),
            torch.ones_like(difference, dtype=torch.bool),
            Surrogate.of(self),
            weights=None if weights is None else inputs.row_means(weights),
        )
        loss = inputs.mean(each.loss[inputs.rows], self.aggregation)
        metrics = [inputs.row_mean(x.to(difference.dtype)) for x in (each.approxkl, each.clipped, each.ratio)]
        return PolicyTerm(loss, *metrics), inputs.mask & each.clipped[inputs.rows]


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
