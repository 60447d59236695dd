"""The paper's two rules as written, and what is wrong with them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from oppo.admission import Observation, SlopeAdaptive
from oppo.admission.adaptive import SlopeRule
from oppo.errors import AdmissionError


def told(controller: SlopeAdaptive, *scores: float) -> list[int]:
    """Return what the controller chose after each of the scores."""
    chosen = []
    for step, score in enumerate(scores):
        controller.observe(Observation(step, score=score))
        chosen.append(controller.overcommit)
    return chosen


def test_the_text_moves_by_one_with_the_sign_of_the_slope() -> None:
    controller = SlopeAdaptive(batch=32, window=2, most=6, initial=4)
    assert told(controller, 0.0, 1.0, 2.0, 3.0, 4.0, 0.0, 0.0) == [4, 4, 5, 6, 6, 5, 4]


def test_algorithm_1_moves_by_a_quarter_at_least_by_one() -> None:
    controller = SlopeAdaptive(batch=64, rule="algorithm1", window=1, most=40, initial=16)
    assert told(controller, 0.0, 1.0, 2.0, 3.0, 4.0) == [16, 20, 25, 31, 38]
    falling = SlopeAdaptive(batch=64, rule="algorithm1", window=1, most=40, initial=5)
    assert told(falling, 5.0, 4.0, 3.0, 2.0, 1.0, 0.0, -1.0) == [5, 4, 3, 2, 1, 0, 0]


@pytest.mark.parametrize("rule", ["text", "algorithm1"])
def test_the_sum_telescopes_so_that_only_two_scores_of_the_window_count(rule: SlopeRule) -> None:
    def after(*between: float) -> int:
        return told(SlopeAdaptive(batch=32, rule=rule, window=4), 1.0, *between, 1.1)[-1]

    assert after(2.0, 3.0, 9.0) == after(-5.0, 0.0, -9.0) == after(1.0, 1.0, 1.0) == 5


@pytest.mark.parametrize("rule", ["text", "algorithm1"])
def test_on_a_noisy_plateau_it_does_not_decay(rule: SlopeRule) -> None:
    """The weakness: nothing is learned any more, and yet about half of the largest staleness is paid for ever."""
    random = np.random.default_rng(0)
    plateau = (4.0 + 0.1 * random.standard_normal(4_000)).tolist()
    chosen = told(SlopeAdaptive(batch=32, rule=rule, most=8), *plateau)
    assert 0.3 * 8 < np.mean(chosen[1_000:]) < 0.7 * 8


def test_a_step_without_a_score_changes_nothing() -> None:
    controller = SlopeAdaptive(batch=32, window=1)
    assert told(controller, 1.0, math.nan, 2.0) == [4, 4, 5]


def test_it_goes_on_from_its_state() -> None:
    scores = np.random.default_rng(1).standard_normal(40).tolist()
    whole, first = SlopeAdaptive(batch=32, window=5), SlopeAdaptive(batch=32, window=5)
    expected = told(whole, *scores)
    told(first, *scores[:17])
    second = SlopeAdaptive(batch=32, window=5)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert told(second, *scores[17:]) == expected[17:]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"least": 3, "most": 2}, "0 <= least <= initial <= most must hold, not 0, 3, 2, 2"),
        ({"most": 5}, "overcommit must lie in 0 .. batch = 4, not 5"),
        ({"most": 2, "window": 0}, "window must be at least 1, not 0"),
    ],
)
def test_impossible_settings_are_refused(settings: dict[str, int], message: str) -> None:
    with pytest.raises(AdmissionError, match=message):
        SlopeAdaptive(batch=4, **settings)  # type: ignore[arg-type]  # by keyword
