"""Packing: a ragged batch as forward passes of bounded size, and the way back to flat tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from oppo.events import Batch, FloatArray, Prompt, Support
from oppo.hf.kv.attention import cheapest_groups, filled, pass_overhead
from oppo.losses import Input, Unit

Name = TypeVar("Name", bound=str)

CPU_TOKENS: Final = 2048
"""Tokens of a forward pass on a CPU; twice as many take as long each, and a quarter more memory of a small run."""

GPU_TOKENS: Final = 16384  # the same on a GPU, where Python needs as long to start a pass of few tokens as of many

HOST_WORK: Final = 5e12
"""Parameters times tokens that an H100 trains while the host starts a pass: 10,000 tokens of 0.5B, 700 of 7B."""


def most_gpu_tokens(parameters: int) -> int:
    """Return a power of two, about ten times the tokens in whose time the host starts a pass: 32,768 to 131,072."""
    enough = int(10 * HOST_WORK / parameters)
    return min(max(2 * GPU_TOKENS, 1 << (enough.bit_length() - 1)), 8 * GPU_TOKENS)


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Rows of a batch as one forward pass: n rows, with T response tokens in all."""

    # Padded on the right to L tokens, or packed, end to end. The last token of each row is not read, since it predicts
    # none. Padding needs no mask: no token before it attends to it, and it predicts none.

    ids: Tensor  # int64 [n, L]; packed, [1, L]
    positions: Tensor  # int64, as ids
    lengths: Sequence[int]  # the ids of each row that are not padding
    keep: Tensor  # int64 [K], the columns that predict a response token of some row
    at: Tensor  # int64 [T], of [n * K, ...], the place in an [n, K, ...] output that predicts each response token
    rows: Tensor  # int64 [T], the row of each response token
    tokens: Tensor  # int64 [T]
    mask: Tensor  # bool [T], the tokens that are trained
    groups: Tensor  # int64 [n]
    shares: Tensor  # float32 [n], see oppo.losses.Inputs
    versions: Tensor  # int64 [T]
    behaviour: Tensor  # float32 [T], log-probs
    given: Mapping[Input, Tensor]  # inputs of the loss that the batch holds: float32 [T], [T, k + 1], or [n]
    support: Support  # of the T tokens
    top_ids: Tensor | None = None  # int64 [T, k], the likeliest ids of a teacher, if the loss reads them
    routed_experts: Tensor | None = None  # int64 [layers, ids, k], see oppo.hf.expert_routing.replaying; None: free
    prompts: Sequence[Prompt] = ()  # of each row, where one shows images

    @property
    def padding(self) -> int:
        return self.ids.numel() - sum(self.lengths)

    @property
    def packed(self) -> bool:
        return len(self.ids) < len(self.lengths)

    @property
    def read(self) -> Tensor:
        """Whether each id is no padding, bool like ``ids``: made, and sent to the device, at each access."""
        if self.packed:
            return torch.ones_like(self.ids, dtype=torch.bool)
        lengths = torch.tensor(self.lengths, device=self.ids.device)
        return torch.arange(self.ids.shape[1], device=self.ids.device) < lengths[:, None]


def units(batch: Batch, unit: Unit) -> list[list[int]]:
    """Return the rows with a sampled token, in admission order, grouped so that a loss of this unit can see them."""
    rows = [row for row, tokens in enumerate(batch.rows()) if batch.sampled[tokens].any()]
    members = dict[int, list[int]]()
    for row in rows:
        members.setdefault(batch.responses[row].prompt.group if unit == "group" else row, []).append(row)
    return list(members.values())


def minibatches(batch: Batch, units: Sequence[list[int]], count: int, key: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield one epoch of units, shuffled by ``key``, in ``count`` parts of nearly equal size; none is empty."""
    # The conversations of a rollout stay together.
    rollouts = dict[int, list[list[int]]]()
    for unit in units:
        rollouts.setdefault(batch.responses[unit[0]].prompt.first, []).append(unit)
    whole = list(rollouts.values())
    shuffled = np.random.default_rng(key).permutation(len(whole))
    for part in np.array_split(shuffled, count):
        if len(part):
            yield list(chain.from_iterable(whole[each] for each in part))


def tokens_read(batch: Batch, rows: Sequence[int], *, packed: bool = False) -> int:
    read = [_read(batch, row) for row in rows]
    return sum(read) if packed else len(rows) * max(read)


def longest_read(batch: Batch) -> int:
    return max(_read(batch, row) for row in range(len(batch)))


def micro_batches(
    batch: Batch, units: Sequence[list[int]], device: torch.device, budget: int | None, *, packed: bool = False
) -> Iterator[list[int]]:
    """Yield the rows of ``units`` in groups, each of them one forward pass on ``device``, the longest first."""
    # A pass has at most `budget` tokens, padding included, None: as many as suit the device; a longer unit has its own.
    if budget is None:
        budget = CPU_TOKENS if device.type == "cpu" else GPU_TOKENS
    units = sorted(units)  # of units of one length the earlier comes first
    if packed:
        sizes = [sum(_read(batch, row) for row in unit) for unit in units]
        for group in filled(sizes, budget):
            yield list(chain.from_iterable(units[each] for each in group))
        return
    longest, counts = [max(_read(batch, row) for row in unit) for unit in units], [len(unit) for unit in units]
    overhead = pass_overhead(device)
    for group in cheapest_groups(longest, range(len(units)), overhead=overhead, budget=budget, counts=counts):
        yield list(chain.from_iterable(units[each] for each in group))


def _read(batch: Batch, row: int) -> int:
    response = batch.responses[row]
    return len(response.prompt.tokens) + len(response) - 1


def shares(batch: Batch) -> FloatArray:
    """Return the share of each row in the sampled tokens of its trajectory, float32 [N]: 1 if it is the only one."""
    sampled = np.array([len(row) for row in batch.sampled_rows()], np.float64)
    whole = np.ones(len(batch))
    for rows in batch.conversations():
        whole[rows] = max(1.0, sampled[rows].sum())
    return (sampled / whole).astype(np.float32)


def shows_images(batch: Batch, rows: Sequence[int] | None = None) -> bool:
    return any(batch.responses[row].prompt.images for row in (range(len(batch)) if rows is None else rows))


def pack(
    batch: Batch, rows: Sequence[int], device: torch.device, inputs: Collection[Input] = (), *, packed: bool = False
) -> MicroBatch:
    prompts = [batch.responses[row].prompt.tokens for row in rows]
    tokens = batch.rows()
    spans = [tokens[row] for row in rows]
    lengths = [span.stop - span.start for span in spans]
    read = [len(prompt) + length - 1 for prompt, length in zip(prompts, lengths, strict=True)]
    width, row = max(read), np.repeat(np.arange(len(rows)), lengths)
    ids = np.zeros((len(rows), width), np.int64)
    for each, (prompt, span) in enumerate(zip(prompts, spans, strict=True)):
        ids[each, : read[each]] = np.concatenate((prompt, batch.tokens[span]))[:-1]
    taken = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    columns = np.concatenate(
        [np.arange(length) + len(prompt) - 1 for prompt, length in zip(prompts, lengths, strict=True)]
    )
    positions = np.broadcast_to(np.arange(width), ids.shape)
    if packed:
        real = positions < np.array(read)[:, None]
        ids, positions = ids[real][None], positions[real][None]
        keep = columns + (np.cumsum(read) - read)[row]
        at = np.arange(len(keep))
    else:
        keep = np.arange(min(len(prompt) for prompt in prompts) - 1, width)
        at = row * len(keep) + columns - keep[0]
    held: dict[Input, FloatArray | None] = {
        "behaviour": batch.logprobs,
        "advantages": batch.advantages,
        "old_values": batch.values,
        "returns": batch.returns,
        "scores": batch.scores,
        "proximal": batch.proximal,
        "reference": batch.reference,
        "teacher_top": batch.teacher_top,
    }
    listed = {} if batch.teacher_ids is None or "top_logprobs" not in inputs else {"top_ids": batch.teacher_ids[taken]}
    whole = _uploaded(
        {
            **listed,
            "ids": ids,
            "positions": positions,
            "keep": keep,
            "at": at,
            "rows": row,
            "tokens": batch.tokens[taken],
            "groups": np.array([batch.responses[row].prompt.group for row in rows]),
            "versions": batch.versions[taken],
            "mask": batch.sampled[taken],
        },
        np.int64,
        device,
    )
    given = {
        name: column[list(rows) if name == "scores" else taken]
        for name, column in held.items()
        if column is not None and (name in inputs or name == "behaviour")
    }
    floats = _uploaded({**given, "shares": shares(batch)[list(rows)]}, np.float32, device)
    return MicroBatch(
        lengths=read,
        mask=whole.pop("mask").bool(),
        behaviour=floats["behaviour"],
        shares=floats["shares"],
        given={name: floats[name] for name in given if name in inputs},
        support=batch.column(Support, rows),
        prompts=[batch.responses[row].prompt for row in rows] if shows_images(batch, rows) else (),
        **whole,
    )


def _uploaded(arrays: Mapping[Name, NDArray[Any]], dtype: type[np.generic], device: torch.device) -> dict[Name, Tensor]:
    # In one transfer, since each waits for the device.
    flat = torch.from_numpy(np.concatenate([each.ravel() for each in arrays.values()], dtype=dtype)).to(device)
    parts = flat.split([each.size for each in arrays.values()])
    return {name: part.view(array.shape) for (name, array), part in zip(arrays.items(), parts, strict=True)}
