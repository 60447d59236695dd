"""Without lookahead a run is what it was before steps could be in flight: items, their times, batches, reports."""

from __future__ import annotations

import json

import pytest

from tests.golden.make_schedules import CASES, PATH, RESUMED, digests

RECORDED = json.loads(PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", CASES)
def test_a_run_without_lookahead_is_bit_for_bit_the_one_that_was_recorded(case: str) -> None:
    assert digests(CASES[case]) == RECORDED[case]


def test_a_resumed_one_is_too() -> None:
    case, first = RESUMED
    assert digests(CASES[case], first) == RECORDED[f"{case}, resumed"]
