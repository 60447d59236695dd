"""From a ragged batch to padded forward passes of bounded size, and back to flat tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.events import Batch, FloatArray
from oppo.hf.kv.length_bucketing import cheapest_groups, overhead_on
from oppo.losses import Input, SupportIndex, Unit


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Some rows of a batch as one forward pass; n rows padded on the right to L tokens, T response tokens in all.

    The last token of each row is not read: nothing is predicted from it. Padding needs no mask: causal attention keeps
    it out of the sight of every token before it, and nothing is predicted from padding either.

    Attributes:
        ids, positions: int64 [n, L].
        padding: how many of the ``ids`` are padding.
        keep: int64 [K], the sequence positions from which some row predicts a response token.
        row, column: int64 [T], where in an [n, K, ...] output each response token was predicted.
        tokens: int64 [T].
        mask: bool [T], true for the tokens that are trained.
        groups: int64 [n], the group of each row.
        versions: int64 [T].
        behaviour: float32 [T], as it came with the batch.
        given: what else was asked for, as it came with the batch: float32 [T], or [n] where it is of rows.
        support: where the ids lie from which the T tokens were drawn; ``None`` if that was the whole vocabulary.
    """

    ids: Tensor
    positions: Tensor
    padding: int
    keep: Tensor
    row: Tensor
    column: Tensor
    tokens: Tensor
    mask: Tensor
    groups: Tensor
    versions: Tensor
    behaviour: Tensor
    given: Mapping[Input, Tensor]
    support: SupportIndex | None


def trainable(batch: Batch) -> NDArray[np.int64]:
    """Return the rows of the batch of which at least one token was sampled: int64."""
    return np.array([r for r, tokens in enumerate(batch.rows()) if batch.sampled[tokens].any()], np.int64)


def units(batch: Batch, unit: Unit) -> list[list[int]]:
    """Return the trainable rows of the batch, each with those that it may not be segmented from, in admission order."""
    rows = trainable(batch).tolist()
    if unit != "group":
        return [[row] for row in rows]
    groups = dict[int, list[int]]()
    for row in rows:
        groups.setdefault(batch.responses[row].prompt.group, []).append(row)
    return list(groups.values())


def minibatches(whole: Sequence[list[int]], count: int, key: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield one epoch of units, shuffled by ``key``, in ``count`` parts of nearly equal size; none is empty."""
    shuffled = np.random.default_rng(key).permutation(len(whole))
    yield from ([whole[each] for each in part] for part in np.array_split(shuffled, count) if len(part))


def micro_batches(batch: Batch, whole: Sequence[list[int]], device: torch.device, budget: int) -> Iterator[list[int]]:
    """Yield the rows of ``whole`` units in groups, each of them one forward pass on ``device``, the longest first.

    Args:
        batch: of the rows.
        whole: rows that stay together.
        device: of the models.
        budget: tokens of a pass at most, padding included; a longer unit gets a pass of its own.
    """
    whole, read = sorted(whole), read_lengths(batch)  # of units of one length the earlier comes first
    longest, counts = [max(read[row] for row in unit) for unit in whole], [len(unit) for unit in whole]
    overhead = overhead_on(device)
    for group in cheapest_groups(longest, range(len(whole)), overhead=overhead, budget=budget, counts=counts):
        yield list(chain.from_iterable(whole[each] for each in group))


def read_lengths(batch: Batch) -> list[int]:
    """Return how many tokens of each row a forward pass reads."""
    return [len(response.prompt.tokens) + len(response) - 1 for response in batch.responses]


def pack(batch: Batch, rows: Sequence[int], device: torch.device, asked: Collection[Input] = ()) -> MicroBatch:
    """Return the given rows of the batch as one forward pass on ``device``, with what of it is ``asked`` and there."""
    prompts = [batch.responses[r].prompt.tokens for r in rows]
    every = batch.rows()
    spans = [every[r] for r in rows]
    lengths = [span.stop - span.start for span in spans]
    read = [len(prompt) + length - 1 for prompt, length in zip(prompts, lengths, strict=True)]
    width = max(read)
    first = min(len(prompt) for prompt in prompts) - 1
    ids = np.zeros((len(rows), width), np.int64)
    for i, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
        sequence = np.concatenate((prompt, batch.tokens[span]))[:-1]
        ids[i, : len(sequence)] = sequence
    taken = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    columns = [np.arange(length) + len(prompt) - 1 - first for prompt, length in zip(prompts, lengths, strict=True)]

    def tensor(array: NDArray[np.generic]) -> Tensor:
        return torch.tensor(array, device=device)

    return MicroBatch(
        ids=tensor(ids),
        positions=torch.arange(width, device=device).expand(len(rows), width),
        padding=ids.size - sum(read),
        keep=torch.arange(first, width, device=device),
        row=tensor(np.repeat(np.arange(len(rows)), lengths)),
        column=tensor(np.concatenate(columns)),
        tokens=tensor(batch.tokens[taken].astype(np.int64)),
        mask=tensor(batch.sampled[taken]),
        groups=tensor(np.array([batch.responses[r].prompt.group for r in rows], np.int64)),
        versions=tensor(batch.versions[taken].astype(np.int64)),
        behaviour=tensor(batch.logprobs[taken]),
        given={
            name: tensor(column[list(rows) if name == "scores" else taken])
            for name, column in _columns(batch).items()
            if name in asked
        },
        support=SupportIndex.of(batch.support(rows), device),
    )


def _columns(batch: Batch) -> dict[Input, FloatArray]:
    """Return what a batch holds for losses."""
    columns: dict[Input, FloatArray | None] = {
        "behaviour": batch.logprobs,
        "advantages": batch.advantages,
        "old_values": batch.values,
        "returns": batch.returns,
        "scores": batch.scores,
        "proximal": batch.proximal,
        "reference": batch.reference,
    }
    return {name: column for name, column in columns.items() if column is not None}
