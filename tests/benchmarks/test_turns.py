"""What an answer costs the others: which gaps are counted, not how long they are."""

from __future__ import annotations

import math

from benchmarks.turns import Course, Pauses, measure
from oppo.placement import Thread
from tests.hf import tiny


def test_a_gap_between_two_calls_is_compared_with_those_on_either_side_of_it() -> None:
    course = Course(ends=[0, 1, 2, 5, 6, 8, 9.5, 10.5], calls=[1, 1, 1, 2, 2, 2, 3, 3], joined={3})
    assert list(course.borders(joined=False)) == [(3, 1)]
    assert list(course.borders(joined=True)) == [(1.5, 1.5)]
    found = Pauses.of([course])
    assert (found.interrupted, found.answered, found.interruptions, found.answers) == (2, 0, 1, 1)
    assert math.isnan(Pauses.of([Course(ends=[0, 1, 2, 5, 6], calls=[1, 1, 1, 2, 2])]).answered), "of none, no figure"


@tiny.apart
def test_answers_and_interruptions_are_both_met() -> None:
    with Thread("actor") as place:
        found = measure(tiny.causal(), place, rounds=2, rows=6, length=60)
    assert found.answers > 0
    assert found.step > 0
