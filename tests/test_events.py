"""Supports and routed experts: however they are cut and put together again, each token keeps its own."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, strategies as st

from oppo.events import Chunk, Prompt, Response, RoutedExperts, Support, TokenColumns, ToolTokens, merge_chunks
from oppo.stages.ledger import RolloutSnapshot

Listed = list[tuple[bool, set[int]]]
"""Of each token, whether it was one of the ids or any but them, and the ids."""

LISTED = st.lists(st.tuples(st.booleans(), st.sets(st.integers(0, 30), max_size=5)), max_size=12)


def support_of(listed: Listed) -> Support:
    ids = [token for _, kept in listed for token in sorted(kept)]
    return Support(
        np.array(ids, np.int32), np.array([len(kept) * (1 if exact else -1) for exact, kept in listed], np.int32)
    )


def written(support: Support, count: int) -> list[tuple[int, list[int]]]:
    alone = [columns[Support] for columns in TokenColumns(support).split(count)]
    return [(int(one.counts.sum()), one.ids.tolist()) for one in alone]


@given(LISTED, st.lists(st.integers(0, 12), max_size=3))
def test_a_support_in_parts_is_the_support_again(listed: Listed, cuts: list[int]) -> None:
    whole = support_of(listed)
    bounds = [0, *sorted(min(cut, len(listed)) for cut in cuts), len(listed)]
    parts = [(whole.slice(a, b), b - a) for a, b in pairwise(bounds)]
    assert written(Support.concatenate(parts), len(listed)) == written(whole, len(listed))
    assert [row for part, n in parts for row in written(part, n)] == written(whole, len(listed))


@given(LISTED, st.data())
def test_a_token_is_held_if_it_is_listed_or_not_left_out(listed: Listed, data: st.DataObject) -> None:
    tokens = data.draw(st.lists(st.integers(0, 30), min_size=len(listed), max_size=len(listed)))
    expected = [not kept or (token in kept) == exact for token, (exact, kept) in zip(tokens, listed, strict=True)]
    assert support_of(listed).holds(np.array(tokens, np.int32)).tolist() == expected


def test_where_nothing_was_left_out_nothing_is_kept() -> None:
    many = Support.concatenate([(Support(), 1_000_000), (support_of([(False, set())] * 3), 3), (Support(), 7)])
    assert many.empty
    assert len(many.counts) == 0
    assert many.slice(5, 900).empty
    assert many.holds(np.arange(4, dtype=np.int32)).all()


def test_counts_that_do_not_add_up_are_refused() -> None:
    with pytest.raises(ValueError, match="of 2 tokens counts 5 ids, but holds 1"):
        Support(np.array([4], np.int32), np.array([2, -3], np.int32))


def chunk(start: int, listed: Listed) -> Chunk:
    n = len(listed)
    ints, floats = np.arange(n, dtype=np.int32), np.zeros(n, np.float32)
    return Chunk(0, start, ints, floats, ints, TokenColumns(support_of(listed)))


@given(LISTED, LISTED)
def test_merged_chunks_and_grown_responses_keep_what_each_token_was_sampled_from(one: Listed, two: Listed) -> None:
    first, second, n = chunk(0, one), chunk(len(one), two), len(one) + len(two)
    merged = merge_chunks(first, second)
    assert isinstance(merged, Chunk)
    assert written(merged.extra[Support], n) == written(support_of([*one, *two]), n)
    answer = ToolTokens(0, len(one), np.zeros(2, np.int32))
    grown = Response.empty(Prompt(0, 0, np.zeros(1, np.int32))).then(first).then(answer).then(chunk(len(one) + 2, two))
    assert written(grown.extra[Support], n + 2) == written(
        support_of([*one, (True, set()), (True, set()), *two]), n + 2
    )
    tail = grown.chunk(len(one) + 1)
    assert (tail.start, len(tail.tokens)) == (len(one) + 1, 1 + len(two))
    assert written(tail.extra[Support], 1 + len(two)) == written(support_of([(True, set()), *two]), 1 + len(two))


@given(st.lists(st.integers(0, 3), min_size=1, max_size=8), st.integers(1, 8), st.booleans())
def test_routed_experts_stay_where_they_were_chosen(counts: list[int], cut: int, known: bool) -> None:
    rows = np.arange(6 * sum(counts), dtype=np.uint8).reshape(-1, 3, 2)
    whole = RoutedExperts(rows, np.array(counts, np.int32))
    n, floats, ints = len(counts), np.zeros(len(counts), np.float32), np.zeros(len(counts), np.int32)
    cut = min(cut, n)
    head = Chunk(0, 0, ints[:cut], floats[:cut], ints[:cut], TokenColumns(whole.slice(0, cut)))
    tail = Chunk(0, cut, ints[cut:], floats[cut:], ints[cut:], TokenColumns(whole.slice(cut, n)))
    response = Response.empty(Prompt(0, 0, np.zeros(3, np.int32))).then(head).then(tail)
    assert response.extra[RoutedExperts].known(response.prompt) == (
        3 + int(np.flatnonzero(counts)[-1]) if any(counts) else 0
    )
    answered = response.then(ToolTokens(0, n, np.zeros(2, np.int32)))
    of_last = RoutedExperts(np.zeros((1, 3, 2), np.uint8), np.ones(1, np.int32))
    last = Chunk(0, n + 2, ints[:1], floats[:1], ints[:1], TokenColumns(of_last))
    answered = answered.then(last) if known and any(counts) else answered
    for grown in (response, answered, Response.of(response.prompt, answered.pieces())):
        routed, at = grown.extra[RoutedExperts], list[int]()
        for token, count in enumerate(map(int, routed.counts)):
            at += range(token - count, token)
        assert routed.positions().tolist() == at
        assert np.array_equal(routed.ids[: len(rows)], rows if any(counts) else routed.ids[:0])
        again = RolloutSnapshot.of(RolloutSnapshot(grown, None).state_dict()).response.extra[RoutedExperts]
        assert np.array_equal(again.ids, routed.ids)
        assert np.array_equal(again.counts, routed.counts)
