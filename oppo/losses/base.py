"""A loss: a pure function of the inputs it declares, whose parts add up over micro-batches.

The trainer passes it a micro-batch at a time, as flat tensors, and the size of the whole minibatch, by which it
divides. So losses, gradients and measurements of micro-batches add up to the minibatch's, however its rows are grouped.
A loss that needs all tokens of a row or all rows of a group at once declares them as its unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, assert_never, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from oppo.errors import ConfigError, shown
from oppo.events import Batch
from oppo.losses.terms import masked_mean
from oppo.training import Aggregation

Divisor: TypeAlias = Literal["tokens", "rows", "groups"]
"""The divisor of a loss's sum: a size of the whole minibatch."""

Unit: TypeAlias = Literal["token", "row", "group"]
"""The least that a loss needs at once: a token; a row, which is one response; or a group, the rows of one prompt."""

Input: TypeAlias = Literal[
    "logprobs",
    "entropies",
    "values",
    "behaviour",
    "proximal",
    "reference",
    "advantages",
    "old_values",
    "returns",
    "scores",
    "top_logprobs",
    "teacher_top",
]
"""An input of a loss; float32 [T], one for each response token, but ``scores`` [R], one for each row, and
``top_logprobs`` and ``teacher_top`` [T, k + 1], log-probs of the teacher's k likeliest ids and of all others together.

The models being trained compute ``logprobs``, ``entropies`` (nats), ``values`` and ``top_logprobs``. The
:class:`~oppo.events.Batch` has the others: ``behaviour``, ``proximal`` and ``reference`` log-probs (nats),
``old_values``, the critic's values when ``advantages`` and ``returns`` were estimated, ``scores``, the reward model's
scalars, and ``teacher_top``.
"""

OF_A_CRITIC: Final[frozenset[Input]] = frozenset({"values", "old_values", "returns"})
"""The inputs that need a critic."""


class Whole(NamedTuple):
    """The size of a whole minibatch: the divisor of means.

    Attributes:
        tokens: trained tokens.
        rows: rows with such a token, where the conversations of one trajectory count once: the sum of the shares of all
            rows, see :class:`Inputs`.
        groups: groups with such a row.
        cap: tokens of the longest response that sampling allows, ``Sampling.max_new_tokens``.
    """

    tokens: float
    rows: float
    groups: float
    cap: float

    @classmethod
    def of(cls, batch: Batch, rows: Sequence[int], cap: int) -> Whole:
        """Return the size of these rows of ``batch``, of responses of at most ``cap`` tokens."""
        spans = batch.rows()
        tokens = sum(int(batch.sampled[spans[row]].sum()) for row in rows)
        prompts = [batch.responses[row].prompt for row in rows]
        rollouts, groups = {each.trajectory for each in prompts}, {each.group for each in prompts}
        return cls(float(tokens), float(len(rollouts)), float(len(groups)), float(cap))


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """The inputs of a loss for one micro-batch: T response tokens of R rows, end to end, without padding.

    ``inputs["advantages"]`` is an input that the loss declares; ``"reference" in inputs`` tests for one.

    Attributes:
        mask: bool [T], true for the tokens that are trained: the policy sampled them.
        rows: int64 [T], ascending, the row of each token, from 0.
        groups: int64 [R], the group of each row. The rows of a group are adjacent, in the order of the batch, if a
            group is the loss's unit.
        whole: the size of the minibatch.
        given: the inputs by name.
        shares: float32 [R], the share that each row has of the trained tokens of its rollout, of which an agent may
            have several rows; ``None``: 1.

    Example:
        >>> mask, rows, groups = torch.tensor([True, False, True]), torch.tensor([0, 0, 1]), torch.tensor([5, 5])
        >>> Inputs(mask, rows, groups, Whole(tokens=2, rows=2, groups=1, cap=4)).row_sums(torch.ones(3)).tolist()
        [1.0, 1.0]
    """

    mask: Tensor
    rows: Tensor
    groups: Tensor
    whole: Whole
    given: Mapping[Input, Tensor] = field(default_factory=dict)
    shares: Tensor | None = None

    def __getitem__(self, name: Input) -> Tensor:
        """Return an input, float32 [T], or [R] for rows."""
        if name not in self.given:
            raise ConfigError(
                f"a loss reads {name!r} and was given {', '.join(self.given) or 'nothing'}: name it in its `reads`, "
                f"or, if it is in its `measures`, test first whether {name!r} is in the inputs"
            )
        return self.given[name]

    def __contains__(self, name: object) -> bool:
        return name in self.given

    def mean(self, x: Tensor, aggregation: Aggregation = "tokens") -> Tensor:
        """Return this micro-batch's part of a mean of ``x``, float [T], over the minibatch: a scalar.

        ``tokens``: over its trained tokens (DAPO: Yu et al. 2025, arXiv 2503.14476, equation 12), so that a response
        counts by its length. ``responses``: over the means of its responses (GRPO: Shao et al. 2024, arXiv 2402.03300,
        equation 3), so that a token of a long response counts less. ``constant``: the sums of its responses, divided by
        the length cap and averaged (Dr. GRPO: Liu et al. 2025, arXiv 2503.20783, section 3.2), so that a token counts
        the same in every minibatch. ``response_sums``: the same without the cap.

        A rollout counts once, with the tokens of all its conversations as those of one response: what an agent says in
        one conversation or in several has the same weight.
        """
        match aggregation:
            case "tokens":
                return masked_mean(x, self.mask, self.whole.tokens)
            case "responses":
                return self.row_mean(self.row_means(x))
            case "constant":
                return masked_mean(x, self.mask, self.whole.rows * self.whole.cap)
            case "response_sums":
                return masked_mean(x, self.mask, self.whole.rows)
            case _:
                assert_never(aggregation)

    def row_sums(self, x: Tensor) -> Tensor:
        """Return the sum of ``x``, float [T], over the trained tokens of each row: float [R]."""
        counted = torch.where(self.mask, x, torch.zeros_like(x))
        return x.new_zeros(len(self.groups)).index_add(0, self.rows, counted)

    def row_means(self, x: Tensor) -> Tensor:
        """Return the mean of ``x``, float [T], over the trained tokens of each row: float [R]; 0 without any."""
        return self.row_sums(x) / self.row_sums(torch.ones_like(x)).clamp(min=1)

    def row_mean(self, x: Tensor) -> Tensor:
        """Return this part of the mean of ``x``, float [R], over rollouts: each is the mean of its rows by share."""
        return (x if self.shares is None else x * self.shares).sum() / self.whole.rows


@dataclass(frozen=True, slots=True, eq=False)
class LossValue:
    """The value of a loss for one micro-batch.

    Attributes:
        loss: float32 scalar with gradient; the parts of a minibatch add up to its loss.
        measured: float32 scalars that add up likewise; the same names for all of a batch.
        clipped: bool [T], the tokens without gradient because their ratio is clipped, reported by their age; ``None``
            for a loss without clipping.
        weights: float32 [T], importance weights of stale tokens; ``None``: 1.

    Raises:
        ConfigError: the loss or a measurement is no scalar tensor.
    """

    loss: Tensor
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    clipped: Tensor | None = None
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.measured, Mapping):
            raise ConfigError(f"LossValue.measured must be tensors by name, got {shown(self.measured)}")
        for name, tensor in {"the loss": self.loss, **self.measured}.items():
            if not isinstance(tensor, Tensor):
                raise ConfigError(f"{name} of a micro-batch must be a torch tensor of one number, got {shown(tensor)}")
            if tensor.ndim:
                raise ConfigError(
                    f"{name} of a micro-batch must be one number, but has the shape {tuple(tensor.shape)}: sum it up, "
                    "and divide it by what inputs.whole has of its kind"
                )


class Loss(Protocol):
    """The function that a trainer minimises.

    A call is a pure function of its inputs. It divides by a size of the whole minibatch, ``inputs.whole``, so that the
    parts add up: the grouping of rows into micro-batches changes gradients by rounding only.

    A loss that divides all that it learns from by the same size may name it, as ``divisor`` (:class:`Divided`). Its
    gradient can then be summed before the size of the batch is known.

    Example: REINFORCE, the mean over rows of ``-A log p`` summed over a row's tokens::

        class Reinforce:
            unit: Unit = "token"
            reads: frozenset[Input] = frozenset({"logprobs", "advantages"})
            measures: frozenset[Input] = frozenset()

            def __call__(self, inputs: Inputs) -> LossValue:
                each = -inputs["advantages"] * inputs["logprobs"]
                loss = inputs.row_sums(each).sum() / inputs.whole.rows
                return LossValue(loss, {"loss/policy_avg": loss})

            def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
                return means(minibatches)
    """

    @property
    def unit(self) -> Unit:
        """The unit that neither micro-batches nor minibatches split; the tokens of a row always stay together."""

    @property
    def reads(self) -> frozenset[Input]:
        """The inputs it learns from; a batch that lacks one is refused before training.

        Inputs computed by the models carry gradient.
        """

    @property
    def measures(self) -> frozenset[Input]:
        """Further inputs for measurements: without gradient, and only if the batch has them."""

    def __call__(self, inputs: Inputs) -> LossValue:
        """Return these tokens' part of the minibatch's loss, and the measurements."""

    def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        """Return the metrics of an update from the measurements of its trained minibatches, at least one.

        :func:`means` suits most losses.
        """


@runtime_checkable
class Divided(Protocol):
    """A loss that divides all that it learns from by one size of the minibatch."""

    @property
    def divisor(self) -> Divisor | None:
        """That size; ``None`` if there are several."""


def means(minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the means of all measurements over minibatches."""
    table = np.array([list(measured.values()) for measured in minibatches])
    return dict(zip(minibatches[0], np.mean(table, axis=0).tolist(), strict=True))


def require_loss(loss: Loss, *, critic: bool) -> None:
    sets = [isinstance(getattr(loss, name, None), AbstractSet) for name in ("reads", "measures")]
    others = [hasattr(loss, name) for name in ("unit", "metrics", "__call__")]
    if isinstance(loss, type) or not all(sets + others):
        raise ConfigError(
            "expected the protocol oppo.losses.Loss, an object with unit, metrics and __call__, whose reads and "
            f"measures are sets of names, for example PPOLoss(); got {shown(loss)}"
        )
    for name, inputs in (("reads", loss.reads), ("measures", loss.measures)):
        if unknown := sorted(inputs - set(get_args(Input))):
            raise ConfigError(
                f"{_named(loss)} {name} {', '.join(unknown)}: expected some of {', '.join(get_args(Input))}"
            )
    if loss.unit not in get_args(Unit):
        raise ConfigError(f"the unit of {_named(loss)} must be one of {', '.join(get_args(Unit))}, not {loss.unit!r}")
    values = sorted(loss.reads & OF_A_CRITIC)
    if values and not critic:
        raise ConfigError(
            f"{_named(loss)} reads {', '.join(values)}, and there is no critic: give the trainer one, or a loss that "
            "reads none of them, for example oppo.losses.ClippedLoss"
        )
    if critic and "values" not in loss.reads:
        raise ConfigError(
            f"there is a critic, and {_named(loss)} does not read its values, so that it would learn nothing: give the "
            "trainer none, or a loss that reads them, for example oppo.losses.PPOLoss"
        )


def require_inputs(loss: Loss, batch: Batch) -> None:
    top = batch.teacher_top, "the likeliest ids of a teacher", "teacher=, for example oppo.hf.TeacherLogprobs"
    optional: dict[Input, tuple[object, str, str]] = {
        "advantages": (batch.advantages, "advantages", "an advantage stage, for example oppo.GAE"),
        "reference": (batch.reference, "reference log-probs", "reference=, for example oppo.hf.ReferenceLogprobs"),
        "proximal": (batch.proximal, "proximal log-probs", "proximal=, for example oppo.hf.ProximalLogprobs"),
        "old_values": (batch.values, "values of a critic", "critic=, for example oppo.hf.ValueModel"),
        "returns": (batch.returns, "returns", "critic=, of whose values oppo.GAE makes them"),
        **dict.fromkeys(("top_logprobs", "teacher_top"), top),
    }
    for name, (column, what, remedy) in optional.items():
        if name in loss.reads and column is None:
            raise ConfigError(
                f"{_named(loss)} reads {what}, and the batch has none: give the recipe {remedy}, or the trainer a loss "
                "that does without them"
            )


def evaluated(loss: Loss, inputs: Inputs) -> LossValue:
    value: object = loss(inputs)
    if not isinstance(value, LossValue):
        raise ConfigError(
            f"{_named(loss)} must return oppo.losses.LossValue(loss, measurements), not {type(value).__name__}"
        )
    if torch.is_grad_enabled() and not getattr(value.loss, "requires_grad", False):
        raise ConfigError(
            f"{_named(loss)} returned a number without gradient: compute it from logprobs, entropies or values of its "
            "inputs, and detach() measurements only"
        )
    return value


def metrics_of(loss: Loss, minibatches: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
    metrics: object = loss.metrics(minibatches)
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics() of {_named(loss)} must return numbers by name, not {shown(metrics)}")
    return metrics


def _named(loss: Loss) -> str:
    return f"the loss {shown(loss)}"
