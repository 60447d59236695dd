from __future__ import annotations

import math
from itertools import pairwise
from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, strategies as st

from oppo.report.charts import HEIGHT, MOST, WIDTH, Line, lines, ticks

SVG = "{http://www.w3.org/2000/svg}"
FLOATS = st.one_of(st.none(), st.floats(-1e6, 1e6), st.floats(allow_nan=False, allow_infinity=False))
VALUES = st.lists(FLOATS, min_size=1, max_size=30)


def line(label: str, values: list[float | None], error: list[float | None] | None = None) -> Line:
    return Line(label, label, range(1, len(values) + 1), values, error or ())


def paths(chart: str) -> list[list[tuple[float, float]]]:
    found = (each.get("d", "") for each in ET.fromstring(chart).iter(f"{SVG}path"))
    return [
        [
            (float(x), float(y))
            for x, y in (point.split()[:2] for point in each.replace("h.01", "").replace("M", "L")[1:].split("L"))
        ]
        for each in found
    ]


@given(first=VALUES, second=VALUES)
def test_any_series_gives_a_well_formed_chart_inside_its_frame(
    first: list[float | None], second: list[float | None]
) -> None:
    count = max(len(first), len(second))
    series = [
        line("one & two", first + [None] * (count - len(first))),
        line("three", second + [None] * (count - len(second))),
    ]
    for within in ((), (0, 1)):
        chart = lines("a < b", series, within=within)
        assert not chart or ET.fromstring(chart).get("aria-label") == "a < b"
        shown = all(abs(each or 0.0) < 1e6 for each in (*first, *second))
        for x, y in (point for path in (paths(chart) if chart else ()) for point in path):
            assert -0.1 <= x <= WIDTH
            assert -0.1 <= y <= HEIGHT or not shown, "others are far off"


def test_what_is_missing_is_a_gap() -> None:
    (path,) = ET.fromstring(lines("score", [line("score", [1.0, None, None, 2.0])])).iter(f"{SVG}path")
    assert path.get("d", "").count("M") == 2


@pytest.mark.parametrize(("steps", "blocks"), [(MOST, MOST), (MOST + 1, 251), (20_000, 500), (20_001, 488)])
def test_areas_of_a_long_run_are_means_of_several_steps(steps: int, blocks: int) -> None:
    decode = line("decode", [float(step % 2) for step in range(steps)]).thinned(MOST, means=True)
    assert len(decode.x) == len(decode.y) == blocks
    if steps in {MOST + 1, 20_000}:  # of a decode time that is 0 and 1 in turn
        assert {*decode.y[:-1]} == {0.5}


def test_a_line_of_a_long_run_has_a_few_points_and_every_spike() -> None:
    values: list[float | None] = [float(step % 7) for step in range(20_000)]
    values[12_345] = 100.0
    (drawn,) = paths(lines("KL", [line("KL", values)]))
    assert len(drawn) <= 2 * MOST
    assert sum(y < HEIGHT / 4 for _, y in drawn) == 1


def test_there_is_no_chart_of_nothing() -> None:
    assert lines("x", [line("x", [None])], within=(0, 1)) == lines("x", []) == ""


def words(chart: str) -> list[tuple[str, float, float]]:
    found = ET.fromstring(chart).iter(f"{SVG}text")
    return [(each.text or "", float(each.get("x", "nan")), float(each.get("y", "nan"))) for each in found]


@pytest.mark.parametrize(
    ("values", "within", "levels"),
    [
        ([3.0, 7.0], (0,), ["0", "2", "4", "6", "8"]),
        ([0.0, 0.0], (0, 1), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([0.25, 0.5], (0, 1), ["0", "0.2", "0.4", "0.6", "0.8", "1"]),
        ([-4.7e-7, 8.5], (0,), ["0", "2", "4", "6", "8", "10"]),
        ([1.0, 2.0], (), ["1", "1.2", "1.4", "1.6", "1.8", "2"]),
        ([2.38, 2.38], (), ["0", "0.5", "1", "1.5", "2", "2.5"]),
        ([-0.137, 0.4], (), ["-0.2", "0", "0.2", "0.4"]),
    ],
)
def test_ticks_are_round_and_the_axis_of_a_count_begins_at_0_and_that_of_a_share_ends_at_1(
    values: list[float | None], within: tuple[float, ...], levels: list[str]
) -> None:
    assert [text for text, x, _ in words(lines("x", [line("x", values)], within=within)) if x == -6] == levels


@given(low=st.floats(-1e12, 1e12), width=st.floats(1e-6, 1e12))
def test_a_few_round_numbers_at_equal_distances_lie_within_any_range(low: float, width: float) -> None:
    high = low + max(width, abs(low) * 1e-6)
    found = ticks(low, high)
    assert 1 <= len(found) <= 7
    assert all(low - 1e-5 * (high - low) <= each <= high + 1e-5 * (high - low) for each in found)
    for one, other in pairwise(found):
        step = other - one
        mantissa = step / 10 ** math.floor(math.log10(step) + 1e-4)
        assert min(abs(mantissa - each) for each in (1, 2, 5, 10)) < 1e-2


def test_steps_are_marked_at_whole_numbers() -> None:
    for count, marks in ((1, ["1"]), (2, ["1", "2"]), (20, ["5", "10", "15", "20"]), (700, ["200", "400", "600"])):
        chart = lines("x", [line("x", [1.0, *[2.0] * (count - 1)])])
        below = [text for text, _, y in words(chart) if y == HEIGHT - 56 + 16]
        assert below == marks


def test_an_interval_is_drawn_and_within_the_frame() -> None:
    chart = lines("x", [line("x", [1.0, 2.0], [0.5, None])])
    bars = [each for each in ET.fromstring(chart).iter(f"{SVG}line") if each.get("x1") == each.get("x2")]
    (bar,) = bars
    assert 0 <= float(bar.get("y2", "nan")) < float(bar.get("y1", "nan")) <= HEIGHT - 56


def test_a_legend_names_every_series_that_is_drawn_within_the_picture() -> None:
    many = {f"eval/pass_at_{2**k}, of the responses that were drawn": [k / 10, 0.9] for k in range(9)}
    chart = lines(
        "passed", [line("nothing", [None]), *(line(name, [*each]) for name, each in many.items())], within=(0, 1)
    )
    root = ET.fromstring(chart)
    height = float(root.get("viewBox", "").split()[-1])
    named = [(x, y) for text, x, y in words(chart) if text in many]
    assert len(named) == 9 == len(list(root.iter(f"{SVG}path")))
    assert all(x + 6 * len(next(iter(many))) <= WIDTH and y <= height for x, y in named)
    assert "nothing" not in [text for text, _, _ in words(chart)]
