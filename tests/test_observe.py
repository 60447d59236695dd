from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, strategies as st

from oppo.observe import Interval, Role, Span, occupation, seconds, union

ROLES: dict[str, Role] = {"actor": "decode", "reward": "score", "critic": "score", "trainer": "update"}


def span(track: str, start: float, end: float) -> Span:
    return Span(track, "", start, end, role=ROLES.get(track))


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
    spans = [span("reward", *each) for each in score]
    spans += [span("actor", *each) for each in decode] + [span("trainer", *each) for each in update]

    def points(intervals: list[Interval]) -> set[int]:
        return {second for start, end in intervals for second in range(int(start), int(end))}

    busy = occupation(spans)
    assert busy.exposed == len(points(score) - points(decode) - points(update))
    assert busy.score == len(points(score))
    hidden = 1 - busy.exposed / busy.score if busy.score else math.nan  # there is nothing to hide
    assert busy.hidden == pytest.approx(hidden, nan_ok=True)


@given(score=INTERVALS, decode=INTERVALS, beside=INTERVALS, elsewhere=INTERVALS)
def test_work_beside_a_step_hides_its_scoring_and_counts_for_nothing_else(
    score: list[Interval], decode: list[Interval], beside: list[Interval], elsewhere: list[Interval]
) -> None:
    own = [span("reward", *each) for each in score] + [span("actor", *each) for each in decode]
    later = [span("trainer", *each) for each in beside] + [span("critic", *each) for each in elsewhere]
    without_role = [Span("generate", "run", 0.0, 99.0, kind="execution"), Span("search", "", 0.0, 99.0, role="other")]
    busy = occupation([*own, *without_role], beside=[*own, *later, *without_role])
    everything = [*decode, *beside]
    assert (busy.score, busy.decode, busy.update) == (seconds(union(score)), seconds(union(decode)), 0.0)
    assert busy.exposed == seconds(union([*score, *everything])) - seconds(union(everything))
