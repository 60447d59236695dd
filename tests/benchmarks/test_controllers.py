"""The comparison of controllers: what is published holds, can be made again, and keeps what is promised."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.controllers.compare import Cell, Results, Standing, cells, mean_lag, mean_speed
from benchmarks.controllers.course import Course
from benchmarks.controllers.page import DOCS, page
from benchmarks.controllers.regimes import ENGINES, REGIMES
from oppo.admission import Overcommit, TailAdaptive

IN_VAIN = {"capped", "train-bound", "score-bound"}
"""Regimes in which deferring saves next to nothing."""


@pytest.fixture(scope="module")
def results() -> Results:
    return Results.load()


def standings(results: Results, controller: str) -> list[Standing]:
    found = results.standings("modern", controller)
    assert [each.regime for each in found] == [regime.name for regime in REGIMES]
    return found


def test_it_is_as_fast_as_fixed_8_at_three_quarters_of_its_lag(results: Results) -> None:
    tail, fixed = standings(results, "tail"), standings(results, "fixed 8")
    assert mean_speed(tail) >= mean_speed(fixed)
    assert mean_lag(tail) <= 0.75 * mean_lag(fixed)


def test_no_fixed_delta_of_the_same_lag_is_faster_by_three_percent(results: Results) -> None:
    assert all(each.speed >= 0.97 * each.frontier for each in standings(results, "tail"))


def test_no_lag_is_paid_where_it_buys_nothing(results: Results) -> None:
    assert all(each.lag <= 0.02 for each in standings(results, "tail") if each.regime in IN_VAIN)


def test_predictions_are_right_in_the_mean(results: Results) -> None:
    assert all(each.outcome.predicted == pytest.approx(1, abs=0.05) for each in standings(results, "tail"))


def test_the_mean_lag_is_what_littles_law_says(results: Results) -> None:
    batches = {regime.name: regime.batch for regime in REGIMES}
    for extra in (4, 8, 16):
        for each in standings(results, f"fixed {extra}"):
            assert each.lag == pytest.approx(extra / batches[each.regime], rel=0.02)
            assert each.outcome.longest_lag <= 2


def test_the_page_shows_the_results(results: Results) -> None:
    assert (DOCS / "controllers.md").read_text(encoding="utf-8") == page(results, ["modern"]), (
        "run: python -m benchmarks.controllers"
    )


def test_what_is_published_comes_out_again(results: Results) -> None:
    cell = Cell("modern", "train-bound", "tail")
    assert cell.run() == results.outcomes[cell]


@pytest.mark.deep
@pytest.mark.parametrize("cell", list(cells("modern"))[::13], ids=str)
def test_one_in_thirteen_of_what_is_published_comes_out_again(results: Results, cell: Cell) -> None:
    assert repr(cell.run()) == repr(results.outcomes[cell]), "as text, where NaN equals NaN"


def test_a_small_run_gains_time_from_deferring_and_foretells_it() -> None:
    regime = replace(REGIMES[0], batch=32, cap=1024, median=(150, 150))
    engine = ENGINES["modern"]
    waiting = Course(regime, engine, Overcommit(32), steps=30, skipped=8).run()
    adaptive = Course(regime, engine, TailAdaptive(32), steps=30, skipped=8).run()
    assert adaptive.seconds < 0.95 * waiting.seconds
    assert adaptive.predicted == pytest.approx(1, abs=0.15)
    assert adaptive.extras[:3] == (0, 0, 0), "it only watches at first"
