"""Packing: a ragged batch as padded forward passes of bounded size, and the way back to flat tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.events import Batch, FloatArray, Support
from oppo.hf.kv.length_bucketing import cheapest_groups, overhead_on
from oppo.losses import Input, Unit


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of a batch as one forward pass: n rows, padded on the right to L tokens, with T response tokens in all.

    The last token of each row is not read, since it predicts none. Padding needs no mask: no token before it attends to
    it, and it predicts none.

    Attributes:
        ids, positions: int64 [n, L].
        lengths: the ids of each row that are not padding.
        keep: int64 [K], the positions that predict a response token of some row.
        row, column: int64 [T], where each response token is predicted in an [n, K, ...] output.
        tokens: int64 [T].
        mask: bool [T], true for the tokens that are trained.
        groups: int64 [n], the group of each row.
        versions: int64 [T].
        behaviour: float32 [T], behaviour log-probs.
        given: inputs of the loss that the batch holds: float32 [T], or [n] for those of rows.
        support: the ids from which the T tokens were sampled.
        routed_experts: those that the routers of the actor take, int64 [layers, n * L, k], see
            :func:`oppo.hf.routers.replaying`; ``None``: they choose freely.
    """

    ids: Tensor
    positions: Tensor
    lengths: Sequence[int]
    keep: Tensor
    row: Tensor
    column: Tensor
    tokens: Tensor
    mask: Tensor
    groups: Tensor
    versions: Tensor
    behaviour: Tensor
    given: Mapping[Input, Tensor]
    support: Support
    routed_experts: Tensor | None = None

    @property
    def padding(self) -> int:
        """Number of ``ids`` that are padding."""
        return self.ids.numel() - sum(self.lengths)

    @property
    def read(self) -> Tensor:
        """Whether each id is no padding, bool [n, L]: made, and sent to the device, at each access."""
        lengths = torch.tensor(self.lengths, device=self.ids.device)
        return torch.arange(self.ids.shape[1], device=self.ids.device) < lengths[:, None]


def units(batch: Batch, unit: Unit) -> list[list[int]]:
    """Return the rows with a sampled token, in admission order, grouped so that a loss of this unit can see them."""
    rows = [row for row, tokens in enumerate(batch.rows()) if batch.sampled[tokens].any()]
    members = dict[int, list[int]]()
    for row in rows:
        members.setdefault(batch.responses[row].prompt.group if unit == "group" else row, []).append(row)
    return list(members.values())


def minibatches(units: Sequence[list[int]], count: int, key: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield one epoch of units, shuffled by ``key``, in ``count`` parts of nearly equal size; none is empty."""
    shuffled = np.random.default_rng(key).permutation(len(units))
    yield from ([units[each] for each in part] for part in np.array_split(shuffled, count) if len(part))


def tokens_read(batch: Batch, rows: Sequence[int]) -> int:
    """Return the tokens of a forward pass over rows, padding included."""
    return len(rows) * max(_read(batch, row) for row in rows)


def micro_batches(batch: Batch, units: Sequence[list[int]], device: torch.device, budget: int) -> Iterator[list[int]]:
    """Yield the rows of ``units`` in groups, each of them one forward pass on ``device``, the longest first.

    A pass has at most ``budget`` tokens, padding included; a longer unit gets a pass of its own.
    """
    units = sorted(units)  # of units of one length the earlier comes first
    longest, counts = [max(_read(batch, row) for row in unit) for unit in units], [len(unit) for unit in units]
    overhead = overhead_on(device)
    for group in cheapest_groups(longest, range(len(units)), overhead=overhead, budget=budget, counts=counts):
        yield list(chain.from_iterable(units[each] for each in group))


def _read(batch: Batch, row: int) -> int:
    response = batch.responses[row]
    return len(response.prompt.tokens) + len(response) - 1


def pack(batch: Batch, rows: Sequence[int], device: torch.device, inputs: Collection[Input] = ()) -> MicroBatch:
    """Return rows of the batch as one forward pass on ``device``, with those of the ``inputs`` that the batch holds."""
    prompts = [batch.responses[row].prompt.tokens for row in rows]
    tokens = batch.rows()
    spans = [tokens[row] for row in rows]
    lengths = [span.stop - span.start for span in spans]
    read = [len(prompt) + length - 1 for prompt, length in zip(prompts, lengths, strict=True)]
    width = max(read)
    first = min(len(prompt) for prompt in prompts) - 1
    ids = np.zeros((len(rows), width), np.int64)
    for row, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
        ids[row, : read[row]] = np.concatenate((prompt, batch.tokens[span]))[:-1]
    taken = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    columns = [np.arange(length) + len(prompt) - 1 - first for prompt, length in zip(prompts, lengths, strict=True)]

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.tensor(array, device=device)

    held: dict[Input, FloatArray | None] = {
        "behaviour": batch.logprobs,
        "advantages": batch.advantages,
        "old_values": batch.values,
        "returns": batch.returns,
        "scores": batch.scores,
        "proximal": batch.proximal,
        "reference": batch.reference,
    }
    return MicroBatch(
        ids=tensor(ids),
        positions=torch.arange(width, device=device).expand(len(rows), width),
        lengths=read,
        keep=torch.arange(first, width, device=device),
        row=tensor(np.repeat(np.arange(len(rows)), lengths)),
        column=tensor(np.concatenate(columns)),
        tokens=tensor(batch.tokens[taken].astype(np.int64)),
        mask=tensor(batch.sampled[taken]),
        groups=tensor(np.array([batch.responses[row].prompt.group for row in rows], np.int64)),
        versions=tensor(batch.versions[taken].astype(np.int64)),
        behaviour=tensor(batch.logprobs[taken]),
        given={
            name: tensor(column[list(rows) if name == "scores" else taken])
            for name, column in held.items()
            if name in inputs and column is not None
        },
        support=batch.support(rows),
    )
