"""Packing: minibatches and micro-batches lose no row, and every token is predicted from the one before it."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
import torch

from oppo.events import Batch, Prompt, Response, Support
from oppo.hf.train.packing import micro_batches, minibatches, pack, tokens_read, units
from oppo.losses import Input, SupportIndex

LENGTHS = ((3, 5), (9, 1), (1, 4))
"""Tokens of each row's prompt and response."""


def batch() -> Batch:
    """Return rows whose token ids are 100 x row + position; the second row has no sampled token."""
    rows = []
    for r, (prompt, response) in enumerate(LENGTHS):
        ids = 100 * (r + 1) + np.arange(prompt + response, dtype=np.int32)
        zeros = np.zeros(response, np.float32)
        masks = np.full(response, r != 1)
        prompted = Prompt(r, r, ids[:prompt], group=7 if r != 1 else 8)
        rows.append(Response(prompted, ids[prompt:], zeros, np.zeros(response, np.int32), masks))
    tokens = np.concatenate([row.tokens for row in rows])
    numbered = np.arange(len(tokens), dtype=np.float32)
    return Batch(
        responses=tuple(rows),
        reasons=tuple("length" for _ in rows),
        scores=np.arange(len(rows), dtype=np.float32),
        offsets=np.cumsum([0, *map(len, rows)]),
        tokens=tokens,
        versions=np.zeros(len(tokens), np.int32),
        sampled=np.concatenate([row.sampled for row in rows]),
        logprobs=numbered,
        proximal=numbered,
        reference=numbered,
        values=numbered + 100,
        rewards=numbered,
        advantages=numbered + 200,
        returns=numbered + 300,
    )


def test_every_response_token_is_predicted_from_the_token_before_it() -> None:
    packed = pack(batch(), [2, 0, 1], torch.device("cpu"))
    read = packed.ids[:, packed.keep].flatten()[packed.at]
    assert torch.equal(read + 1, packed.tokens)
    assert packed.tokens.tolist() == [301, 302, 303, 304, 103, 104, 105, 106, 107, 209]


def test_what_belongs_to_a_token_travels_with_it() -> None:
    asked: list[Input] = ["old_values", "advantages", "returns", "scores"]
    packed = pack(batch(), [2, 0], torch.device("cpu"), asked)
    assert packed.behaviour.tolist() == [6, 7, 8, 9, 0, 1, 2, 3, 4]
    assert torch.equal(packed.given["old_values"], packed.behaviour + 100)
    assert torch.equal(packed.given["advantages"], packed.behaviour + 200)
    assert torch.equal(packed.given["returns"], packed.behaviour + 300)
    assert packed.given["scores"].tolist() == [2, 0]
    assert set(packed.given) == set(asked)
    assert packed.groups.tolist() == [7, 7]
    assert packed.mask.all()


def test_nothing_stands_for_log_probs_that_a_batch_does_not_have() -> None:
    asked: list[Input] = ["proximal", "reference"]
    made = batch()
    for has in (True, False):
        held = made if has else replace(made, proximal=None, reference=None)
        given = pack(held, [0], torch.device("cpu"), asked).given
        assert set(given) == (set(asked) if has else set())


def test_what_tokens_were_sampled_from_travels_with_them() -> None:
    made = batch()
    plain = pack(made, [2, 0], torch.device("cpu"))
    assert plain.support.whole
    first = Support(np.array([103, 7, 104, 8, 9, 105, 107], np.int32), np.array([2, 3, 1, 0, 1], np.int32))
    second = Support(np.array([1, 2, 303], np.int32), np.array([0, -2, 1, 0], np.int32))
    rows = replace(made.responses[0], support=first), made.responses[1], replace(made.responses[2], support=second)
    cpu = torch.device("cpu")
    support = SupportIndex.of(pack(replace(made, responses=rows), [2, 0, 1], cpu).support, cpu)
    assert support is not None
    assert support.narrow.tolist() == [2, 4, 5, 6, 8]
    assert support.kept.tolist() == [[0, 1, 1, 2, 2, 2, 3, 4], [0, 0, 1, 0, 1, 2, 0, 0], [303, *first.ids.tolist()]]
    assert support.width == 3
    assert support.wide.tolist() == [1]
    assert support.barred.tolist() == [[0, 0], [1, 2]]
    assert support.free


def test_padding_is_on_the_right_and_counted() -> None:
    packed = pack(batch(), [0, 2], torch.device("cpu"))
    assert packed.ids.shape == (2, 7)
    assert packed.padding == 3
    assert not packed.ids[1, 4:].any()
    assert packed.positions.tolist() == [list(range(7))] * 2


@pytest.mark.parametrize("count", [1, 3, 12])
def test_minibatches_are_a_shuffled_partition_that_its_key_decides(count: int) -> None:
    whole, single = [[0], [1, 2], [3], [4, 5, 6], [7], [8], [9], [10]], batch().responses[0]
    row_of = {at: replace(single, prompt=replace(single.prompt, rollout=at)) for at in range(11)}
    for at, first in ((8, 0), (10, 3)):  # further conversations
        row_of[at] = replace(single, prompt=replace(single.prompt, rollout=first + 2**32, branch=1))
    lengths = np.cumsum([0] + [len(single)] * 11)
    empty = np.zeros(lengths[-1], np.float32)
    rows = Batch(
        responses=tuple(row_of.values()),
        reasons=("eos",) * 11,
        scores=np.zeros(11, np.float32),
        offsets=lengths,
        tokens=empty.astype(np.int32),
        versions=empty.astype(np.int32),
        sampled=empty == 0,
        logprobs=empty,
    )

    def epoch(last: int) -> list[list[list[int]]]:
        return list(minibatches(rows, whole, count, (0, 1, last)))

    assert sorted(chain.from_iterable(epoch(2))) == whole
    assert len(epoch(2)) == min(count, 6)
    assert epoch(2) == epoch(2)
    assert list(chain.from_iterable(epoch(2))) != list(chain.from_iterable(epoch(3)))
    assert all(([0] in each) == ([8] in each) and ([3] in each) == ([10] in each) for each in epoch(2))


def test_units_are_rows_or_the_rows_of_a_prompt_that_have_a_sampled_token() -> None:
    assert units(batch(), "token") == units(batch(), "row") == [[0], [2]]
    assert units(batch(), "group") == [[0, 2]]


@pytest.mark.parametrize("budget", [1, 15, 10_000])
def test_micro_batches_never_part_a_unit_and_keep_its_order(budget: int) -> None:
    whole = [[0, 2], [1]]
    parts = list(micro_batches(batch(), whole, torch.device("cpu"), budget))
    assert parts == ([[1, 0, 2]] if budget == 10_000 else [[1], [0, 2]])


@pytest.mark.parametrize("budget", [1, 20, 10_000])
def test_packed_micro_batches_fill_the_budget_and_never_part_a_unit(budget: int) -> None:
    whole = [[0, 2], [1]]
    parts = list(micro_batches(batch(), whole, torch.device("cpu"), budget, packed=True))
    sizes = [tokens_read(batch(), part, packed=True) for part in parts]
    assert sorted(chain.from_iterable(parts)) == [0, 1, 2]
    assert all((0 in part) == (2 in part) for part in parts)
    assert len(parts) == 1 or all(sum(pair) > budget for pair in pairwise(sizes))


def test_packed_rows_lie_end_to_end_and_each_begins_at_its_first_position() -> None:
    made, rows, cpu = batch(), [2, 0, 1], torch.device("cpu")
    padded, packed = (pack(made, rows, cpu, {"advantages"}, packed=each) for each in (False, True))
    assert packed.packed
    assert not padded.packed
    assert torch.equal(packed.ids[0], padded.ids[padded.read])
    assert packed.positions[0].tolist() == [at for length in packed.lengths for at in range(length)]
    assert (packed.padding, packed.lengths) == (0, padded.lengths)
    for each in (padded, packed):
        followed = each.ids[:, each.keep].flatten()[each.at]
        assert torch.equal(followed[1:][each.row.diff() == 0], each.tokens[:-1][each.row.diff() == 0])
    for name in ("row", "tokens", "mask", "groups", "versions", "behaviour"):
        assert torch.equal(getattr(packed, name), getattr(padded, name))
    assert torch.equal(packed.given["advantages"], padded.given["advantages"])
