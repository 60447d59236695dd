from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, strategies as st

from oppo.report.charts import HEIGHT, MOST, WIDTH, lines, stacked

SVG = "{http://www.w3.org/2000/svg}"
VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=30)


def bars(chart: str) -> list[dict[str, float]]:
    root = ET.fromstring(chart or "<svg/>")
    rects = [rect for rect in root.iter(f"{SVG}rect") if rect.get("width") != "10.00"]  # not those of the legend
    return [{name: float(rect.get(name, "nan")) for name in ("x", "y", "width", "height")} for rect in rects]


@given(first=VALUES, second=VALUES)
def test_any_series_gives_a_well_formed_chart_inside_its_frame(
    first: list[float | None], second: list[float | None]
) -> None:
    series = {"one & two": first, "three": second}
    for chart in (lines("a < b", series), lines("a < b", series, within=(0, 1)), stacked("a < b", series)):
        assert not chart or ET.fromstring(chart).get("aria-label") == "a < b"
    for bar in bars(stacked("a < b", {"one & two": first, "three": second})):
        assert -0.1 <= bar["x"] <= WIDTH
        assert -0.1 <= bar["y"] <= bar["y"] + bar["height"] <= HEIGHT


@pytest.mark.parametrize(("gaps", "strokes"), [(True, 2), (False, 1)])
def test_what_is_missing_is_a_gap_or_is_passed_over(gaps: bool, strokes: int) -> None:
    chart = lines("score", {"held-out": [1.0, None, None, 2.0]}, gaps=gaps)
    (path,) = ET.fromstring(chart).iter(f"{SVG}path")
    assert path.get("d", "").count("M") == strokes


def test_stacked_bars_stand_on_one_another() -> None:
    decode, update = bars(stacked("time", {"decode": [1.0], "update": [3.0]}))
    assert update["height"] == pytest.approx(3 * decode["height"], abs=0.02)
    assert update["y"] + update["height"] == pytest.approx(decode["y"], abs=0.02)


@pytest.mark.parametrize(("steps", "bars_of"), [(MOST, 1), (MOST + 1, 2), (20_000, 40), (20_001, 41)])
def test_a_long_run_has_bars_of_several_steps_and_says_so(steps: int, bars_of: int) -> None:
    values = [float(step % 2) for step in range(steps)]
    chart = stacked("time", {"decode": values, "update": [1.0] * steps})
    drawn = bars(chart)
    assert len(drawn) == 2 * -(-steps // bars_of) <= 2 * MOST
    assert drawn[-1]["x"] + drawn[-1]["width"] == pytest.approx(WIDTH - 68, abs=1)
    assert f"step {steps}<" in chart
    assert (f"time, means of {bars_of} steps" in chart) == (bars_of > 1)
    if bars_of == 40:
        assert drawn[0]["height"] == pytest.approx(drawn[1]["height"] / 2, abs=0.02)


def test_a_line_of_a_long_run_has_a_few_points_and_every_spike() -> None:
    values = [float(step % 7) for step in range(20_000)]
    values[12_345] = 100.0
    (path,) = ET.fromstring(lines("KL", {"KL": values})).iter(f"{SVG}path")
    drawn = path.get("d", "")
    assert drawn.count("M") == 1
    assert drawn.count("L") <= 2 * MOST
    assert sum(float(point.split(" ")[1]) < HEIGHT / 4 for point in drawn[1:].split("L")) == 1


def test_there_is_no_chart_of_nothing() -> None:
    assert lines("x", {"x": [None, float("nan")]}, within=(0, 1)) == ""
    assert stacked("x", {}) == stacked("x", {"x": [0.0, None]}) == ""


def words(chart: str) -> list[tuple[str, float, float]]:
    found = ET.fromstring(chart).iter(f"{SVG}text")
    return [(each.text or "", float(each.get("x", "nan")), float(each.get("y", "nan"))) for each in found]


@pytest.mark.parametrize(
    ("values", "within", "ends"),
    [
        ([3.0, 7.0], (0,), ("0", "7")),
        ([0.0, 0.0], (0, 1), ("0", "1")),
        ([0.25, 0.5], (0, 1), ("0", "1")),
        ([-4.7e-7, 8.5], (0,), ("0", "8.5")),
        ([1.0, 2.0], (), ("0.95", "2.05")),
    ],
)
def test_the_axis_of_a_count_begins_at_0_and_that_of_a_share_ends_at_1(
    values: list[float], within: tuple[float, ...], ends: tuple[str, str]
) -> None:
    levels = [text for text, x, _ in words(lines("x", {"x": values}, within=within)) if x == -6]
    assert (levels[0], levels[-1]) == ends


def test_a_legend_names_every_series_that_is_drawn_within_the_picture() -> None:
    many = {f"eval/pass_at_{2**k}, of the responses that were drawn": [k / 10, 0.9] for k in range(9)}
    chart = lines("passed", {"nothing": [None], **many}, within=(0, 1))
    root = ET.fromstring(chart)
    height = float(root.get("viewBox", "").split()[-1])
    named = [(x, y) for text, x, y in words(chart) if text in many]
    assert len(named) == 9 == len(list(root.iter(f"{SVG}path")))
    assert all(x + 6 * len(next(iter(many))) <= WIDTH and y <= height for x, y in named)
    assert "nothing" not in [text for text, _, _ in words(chart)]
    assert {text for text, _, _ in words(stacked("time", {"a": [1.0], "b": [0.0], "c": [None]}))} & set("abc") == {"a"}
