from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from oppo.observe import Span
from oppo.overlap import Interval, Role, occupation, seconds, union, work_occupation

ROLES: dict[str, Role] = {"actor": "decode", "reward": "score", "critic": "score", "trainer": "update"}


@pytest.mark.parametrize(
    ("spans", "hidden"),
    [
        ([("actor", 0, 4), ("reward", 1, 3)], 1.0),
        ([("actor", 0, 4), ("reward", 4, 6)], 0.0),
        ([("actor", 0, 4), ("reward", 3, 5), ("trainer", 5, 6)], 0.5),
        ([("reward", 0, 2), ("critic", 0, 2), ("trainer", 1, 4)], 0.5),
        ([("reward", 0, 4), ("actor", 0, 1), ("trainer", 3, 9)], 0.5),
        ([("reward", 0, 4), ("somebody", 0, 4)], 0.0),
    ],
)
def test_scoring_is_hidden_where_something_decodes_or_trains(
    spans: list[tuple[str, float, float]], hidden: float
) -> None:
    assert occupation([Span(track, "", start, end) for track, start, end in spans], ROLES).hidden == hidden


def test_without_scoring_nothing_is_hidden_or_exposed() -> None:
    assert math.isnan(occupation([Span("actor", "", 0, 1)], ROLES).hidden)


INTERVALS = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)).map(lambda p: (float(min(p)), float(max(p)))))


@given(intervals=INTERVALS)
def test_a_union_covers_the_same_points_once(intervals: list[Interval]) -> None:
    covered = {second for start, end in intervals for second in range(int(start), int(end))}
    merged = union(intervals)
    assert seconds(merged) == len(covered)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(merged))


@given(score=INTERVALS, decode=INTERVALS, update=INTERVALS)
def test_exposed_time_is_scoring_and_nothing_else(
    score: list[Interval], decode: list[Interval], update: list[Interval]
) -> None:
    spans = [Span("reward", "", *each) for each in score]
    spans += [Span("actor", "", *each) for each in decode] + [Span("trainer", "", *each) for each in update]

    def points(intervals: list[Interval]) -> set[int]:
        return {second for start, end in intervals for second in range(int(start), int(end))}

    busy = occupation(spans, ROLES)
    assert busy.exposed == len(points(score) - points(decode) - points(update))
    assert busy.score == len(points(score))


@given(score=INTERVALS, decode=INTERVALS, beside=INTERVALS, elsewhere=INTERVALS)
def test_work_beside_a_step_hides_its_scoring_and_counts_for_nothing_else(
    score: list[Interval], decode: list[Interval], beside: list[Interval], elsewhere: list[Interval]
) -> None:
    own = [Span("reward", "extend", *each) for each in score] + [Span("generate", "decode", *each) for each in decode]
    later = [Span("update", "publish", *each) for each in beside] + [
        Span("reward", "finish", *each) for each in elsewhere
    ]
    unknown = [Span("generate", "run", 0.0, 99.0)]
    busy = work_occupation([*own, *unknown], beside=[*own, *later, *unknown])
    everything = [*decode, *beside]
    assert (busy.score, busy.decode, busy.update) == (seconds(union(score)), seconds(union(decode)), 0.0)
    assert busy.exposed == seconds(union([*score, *everything])) - seconds(union(everything))
