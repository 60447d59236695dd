"""A loss: a pure function of what it declares to read, whose parts add up over micro-batches.

The trainer hands it a micro-batch at a time, as flat tensors, and the size of the whole minibatch, by which it divides.
So the parts' losses, gradients and measurements add up to the minibatch's, however its rows are grouped; and what
must be seen at once, the tokens of a row or the rows of a group, the loss declares as its unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set as AbstractSet
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from oppo.errors import ConfigError, shortened
from oppo.events import Batch

Unit: TypeAlias = Literal["token", "row", "group"]
"""What a loss must see at once: a token; a row, which is one response; or the rows of one prompt."""

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
]
"""What a loss can read; float32, for each of T response tokens, ``scores`` for each of R rows.

``logprobs``, ``entropies`` (nats) and ``values`` are what the models being trained say now. The others came with the
:class:`~oppo.events.Batch`: ``behaviour``, ``proximal`` and ``reference`` are log-probs (nats), ``old_values`` the
critic's values when ``advantages`` and ``returns`` were estimated, ``scores`` the reward model's scalars.
"""

OF_A_CRITIC: Final[frozenset[Input]] = frozenset({"values", "old_values", "returns"})
"""What there is only beside a critic."""


class Whole(NamedTuple):
    """The size of the minibatch of which a micro-batch is a part: what a mean divides by.

    Attributes:
        tokens: those that are trained.
        rows: those with such a token.
        groups: those with such a row.
    """

    tokens: float
    rows: float
    groups: float

    @classmethod
    def of(cls, batch: Batch, rows: Sequence[int]) -> Whole:
        """Return the size of these rows of ``batch``."""
        spans = batch.rows()
        tokens = sum(int(batch.sampled[spans[row]].sum()) for row in rows)
        groups = {batch.responses[row].prompt.group for row in rows}
        return cls(float(tokens), float(len(rows)), float(len(groups)))


@dataclass(frozen=True, slots=True, eq=False)
class Inputs:
    """What a loss is given of one micro-batch: T response tokens of R rows, end to end, padding nowhere.

    ``inputs["advantages"]`` is an input that the loss declares, ``"reference" in inputs`` whether it is there.

    Attributes:
        mask: bool [T], true for the tokens that are trained: those that the policy sampled.
        rows: int64 [T], ascending, the row of each token, from 0.
        groups: int64 [R], what names the group of each row. The rows of a group are neighbours, in the order of the
            batch, if a group is the loss's unit.
        whole: the size of the minibatch.
        given: the inputs by name.

    Example:
        >>> mask, rows, groups = torch.tensor([True, False, True]), torch.tensor([0, 0, 1]), torch.tensor([5, 5])
        >>> Inputs(mask, rows, groups, Whole(tokens=2, rows=2, groups=1)).row_sums(torch.ones(3)).tolist()
        [1.0, 1.0]
    """

    mask: Tensor
    rows: Tensor
    groups: Tensor
    whole: Whole
    given: Mapping[Input, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: Input) -> Tensor:
        """Return an input, float32 [T], or [R] if it is of rows.

        Raises:
            ConfigError: the loss does not declare it, or declares it as measured only and the batch has none.
        """
        if name not in self.given:
            raise ConfigError(
                f"a loss reads {name!r} and was given {', '.join(self.given) or 'nothing'}: name it in its `reads`; "
                f"where it is among its `measures`, ask first whether {name!r} is in the inputs"
            )
        return self.given[name]

    def __contains__(self, name: object) -> bool:
        return name in self.given

    def row_sums(self, x: Tensor) -> Tensor:
        """Return the sum of ``x``, float [T], over the trained tokens of each row: float [R]."""
        counted = torch.where(self.mask, x, torch.zeros_like(x))
        return x.new_zeros(len(self.groups)).index_add(0, self.rows, counted)

    def row_means(self, x: Tensor) -> Tensor:
        """Return the mean of ``x``, float [T], over the trained tokens of each row: float [R]; 0 where none is."""
        return self.row_sums(x) / self.row_sums(torch.ones_like(x)).clamp(min=1)


@dataclass(frozen=True, slots=True, eq=False)
class Evaluated:
    """What a loss says of one micro-batch.

    Attributes:
        loss: float32 scalar with gradient, to be minimised; the parts of a minibatch add up to its loss.
        measured: float32 scalars that add up likewise; the same names for all of a batch.
        clipped: bool [T], the tokens that teach nothing because they have moved too far, where the loss knows such a
            thing; told by their age.
        weights: float32 [T], what the loss of each token was multiplied with because it is stale; ``None``: with 1.

    Raises:
        ConfigError: loss or a measurement is no scalar.
    """

    loss: Tensor
    measured: Mapping[str, Tensor] = field(default_factory=dict)
    clipped: Tensor | None = None
    weights: Tensor | None = None

    def __post_init__(self) -> None:
        for name, tensor in {"the loss": self.loss, **self.measured}.items():
            if tensor.ndim:
                raise ConfigError(
                    f"{name} of a micro-batch must be one number, but has the shape {tuple(tensor.shape)}: sum it up, "
                    "and divide it by what inputs.whole has of its kind"
                )


class Loss(Protocol):
    """What a trainer minimises.

    A call is a pure function of its inputs. It divides by a size of the whole minibatch, ``inputs.whole``, so that the
    parts add up: how rows are grouped into micro-batches then changes gradients by rounding only.

    Example: REINFORCE, the mean over rows of ``-A log p`` summed over a row's tokens::

        class Reinforce:
            unit: Unit = "token"
            reads: frozenset[Input] = frozenset({"logprobs", "advantages"})
            measures: frozenset[Input] = frozenset()

            def __call__(self, inputs: Inputs) -> Evaluated:
                each = -inputs["advantages"] * inputs["logprobs"]
                loss = masked_mean(each, inputs.mask, total=inputs.whole.rows)
                return Evaluated(loss, {"loss/policy_avg": loss})

            def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
                return means(minibatches)
    """

    @property
    def unit(self) -> Unit:
        """What neither micro-batch nor minibatch may split; tokens of one row are never parted at all."""

    @property
    def reads(self) -> frozenset[Input]:
        """What it learns from: a batch that lacks one of these is refused before anything is trained.

        A gradient goes back through what the models say.
        """

    @property
    def measures(self) -> frozenset[Input]:
        """What else it reads, to measure only: it is given without gradient, and only where it is there."""

    def __call__(self, inputs: Inputs) -> Evaluated:
        """Return the part of the minibatch's loss that is of these tokens, and what it measures."""

    def metrics(self, minibatches: Sequence[Mapping[str, float]]) -> Mapping[str, float]:
        """Return what is told of an update, from what each minibatch that made a step measured; there is at least one.

        :func:`means` where there is nothing else to be told.
        """


def means(minibatches: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over minibatches of all that they measured."""
    table = np.array([list(measured.values()) for measured in minibatches])
    return dict(zip(minibatches[0], np.mean(table, axis=0).tolist(), strict=True))


def require_loss(loss: Loss, *, critic: bool) -> None:
    """Accept a loss that reads what there is, and trains the ``critic`` if there is one.

    Raises:
        ConfigError: it is no loss, reads what nobody says or has no such unit, it is about a critic and there is none,
            or there is one and it is not.
    """
    sets = [isinstance(getattr(loss, name, None), AbstractSet) for name in ("reads", "measures")]
    if isinstance(loss, type) or not all(sets):
        raise ConfigError(
            "expected the protocol oppo.losses.Loss, an object whose reads and measures are sets of names, for example "
            f"PPOLoss(); got {shortened(repr(loss))}"
        )
    if unknown := sorted((loss.reads | loss.measures) - set(get_args(Input))):
        raise ConfigError(f"{_named(loss)} reads {', '.join(unknown)}: expected some of {', '.join(get_args(Input))}")
    if loss.unit not in get_args(Unit):
        raise ConfigError(f"the unit of {_named(loss)} must be one of {', '.join(get_args(Unit))}, not {loss.unit!r}")
    about = sorted(loss.reads & OF_A_CRITIC)
    if about and not critic:
        raise ConfigError(
            f"{_named(loss)} reads {', '.join(about)}, and there is no critic: give the trainer one, or a loss that "
            "reads none of them, for example oppo.losses.ClippedLoss"
        )
    if critic and "values" not in loss.reads:
        raise ConfigError(
            f"there is a critic, and {_named(loss)} does not read its values, so that it would learn nothing: give the "
            "trainer none, or a loss that reads them, for example oppo.losses.PPOLoss"
        )


def require_inputs(loss: Loss, batch: Batch) -> None:
    """Accept a batch that has what the loss reads; log-probs of another policy never stand for it.

    Raises:
        ConfigError: it lacks some.
    """
    optional: dict[Input, tuple[object, str, str]] = {
        "reference": (batch.reference, "reference log-probs", "reference=, for example oppo.hf.ReferenceLogprobs"),
        "proximal": (batch.proximal, "proximal log-probs", "proximal=, for example oppo.hf.ProximalLogprobs"),
        "old_values": (batch.values, "values of a critic", "critic=, for example oppo.hf.ValueModel"),
        "returns": (batch.returns, "returns", "critic=, of whose values oppo.GAE makes them"),
    }
    for name, (column, what, remedy) in optional.items():
        if name in loss.reads and column is None:
            raise ConfigError(
                f"{_named(loss)} reads {what}, and the batch has none: give the recipe {remedy}, or the trainer a loss "
                "that does without them"
            )


def _named(loss: Loss) -> str:
    return f"the loss {shortened(repr(loss))}"
