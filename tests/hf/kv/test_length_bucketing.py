"""Rows are grouped so that padding and the number of groups together cost least."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from hypothesis import given, strategies as st

from oppo.hf.kv.length_bucketing import cheapest_groups, filled


@given(st.lists(st.integers(1, 30), max_size=12), st.integers(1, 60))
def test_groups_are_filled_up_to_the_budget(sizes: list[int], budget: int) -> None:
    groups = [[sizes[at] for at in group] for group in filled(sizes, budget)]
    assert sorted(at for group in filled(sizes, budget) for at in group) == list(range(len(sizes)))
    assert all(len(group) == 1 or sum(group) <= budget for group in groups)
    assert all(sum(group) + after[0] > budget for group, after in pairwise(groups))


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 3)), max_size=9),
    st.integers(1, 60),
    st.integers(0, 40),
)
def test_no_other_way_to_read_neighbours_within_the_budget_costs_less(
    rows_of: list[tuple[int, int]], budget: int, overhead: int
) -> None:
    lengths, counts = [length for length, _ in rows_of], [count for _, count in rows_of]

    def cost(groups: Iterable[Sequence[int]]) -> float:
        sizes = [sum(counts[row] for row in group) * max(lengths[row] for row in group) for group in groups]
        alone = [len(group) == 1 for group in groups]
        fits = all(size <= budget or single for size, single in zip(sizes, alone, strict=True))
        return sum(sizes) + overhead * len(sizes) if fits else math.inf

    def every_way(rows: Sequence[int]) -> Iterator[list[Sequence[int]]]:
        if not rows:
            yield []
        for size in range(1, len(rows) + 1):
            for rest in every_way(rows[size:]):
                yield [rows[:size], *rest]

    groups = cheapest_groups(lengths, range(len(lengths)), overhead=overhead, budget=budget, counts=counts)
    longest_first = sorted(range(len(lengths)), key=lambda row: (-lengths[row], row))
    assert [row for group in groups for row in group] == longest_first
    assert cost(groups) == min(cost(way) for way in every_way(longest_first))


def test_without_a_budget_one_group_is_best_where_groups_are_dear() -> None:
    assert cheapest_groups([3, 9, 1], [0, 1, 2], overhead=100) == [[1, 0, 2]]


def test_without_rows_there_is_no_group() -> None:
    assert cheapest_groups([3, 9], [], overhead=1) == []
