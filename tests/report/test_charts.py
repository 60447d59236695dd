from __future__ import annotations

from xml.etree import ElementTree as ET

import pytest
from hypothesis import given, strategies as st

from oppo.report.charts import HEIGHT, MOST, WIDTH, lines, stacked

SVG = "{http://www.w3.org/2000/svg}"
VALUES = st.lists(st.one_of(st.none(), st.floats(-1e6, 1e6)), min_size=1, max_size=30)


def bars(chart: str) -> list[dict[str, float]]:
    root = ET.fromstring(chart)
    rects = [rect for rect in root.iter(f"{SVG}rect") if rect.get("width") != "10.00"]  # not those of the legend
    return [{name: float(rect.get(name, "nan")) for name in ("x", "y", "width", "height")} for rect in rects]


@given(first=VALUES, second=VALUES)
def test_any_series_gives_a_well_formed_chart_inside_its_frame(
    first: list[float | None], second: list[float | None]
) -> None:
    ET.fromstring(lines("a < b", {"one & two": first, "three": second}))
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
    assert f"step {steps - 1}<" in chart
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


def test_a_missing_value_is_a_gap_in_the_line() -> None:
    (path,) = ET.fromstring(lines("x", {"x": [1.0, 2.0, None, 3.0]})).iter(f"{SVG}path")
    assert path.get("d", "").count("M") == 2


def test_a_chart_of_nothing_says_so() -> None:
    assert "nothing measured" in lines("x", {"x": [None, float("nan")]})
    assert "nothing measured" in stacked("x", {})
