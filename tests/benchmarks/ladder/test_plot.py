"""The picture of a ladder: what is drawn, from results as they are written."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks.ladder.__main__ import main
from benchmarks.ladder.of_record import PICTURE, Results, ladders
from benchmarks.ladder.plot import LEFT, OURS, PEERS, RIGHT, TIMES_SERIAL, WIDTH, bars_of, draw, title
from oppo.errors import ConfigError

RECORDED = ladders()


def results(*, valid: bool = True, serial: bool = True) -> Results:
    ratios = {"chunk/serial": 1.25, "trl/serial": 0.5} if serial else {}
    return {
        "workload": "paper",
        "layout": "split",
        "valid": valid,
        "machine": {"cpu": "a core"},
        "modes": {
            name: {"tokens_per_second": 100.0} for name in ("serial", "chunk", "trl") if serial or name != "serial"
        },
        "ratios": ratios,
        "ratio_ranges": {name: [ratio - 0.25, ratio + 0.5] for name, ratio in ratios.items()},
    }


def elements(drawn: str, tag: str) -> list[ET.Element]:
    return list(ET.fromstring(f"<svg>{drawn}</svg>").iter(tag))


def test_bars_are_in_times_of_the_serial_step_with_whiskers_to_the_worst_and_the_best_round() -> None:
    drawn = draw(title(results()), bars_of(results()), 2.0)
    scale = (WIDTH - LEFT - RIGHT) / 2.0
    bars = elements(drawn, "rect")
    assert [float(bar.get("width", "nan")) for bar in bars] == pytest.approx([scale, 1.25 * scale, 0.5 * scale])
    assert [bar.get("fill") for bar in bars] == [OURS, OURS, PEERS]
    across = [
        (float(line.get("x1", "nan")), float(line.get("x2", "nan")))
        for line in elements(drawn, "line")
        if line.get("y1") == line.get("y2")
    ]
    assert across[1] == pytest.approx((1.0 * scale, 1.75 * scale), abs=0.1)
    assert across[2] == pytest.approx((0.25 * scale, 1.0 * scale), abs=0.1)
    said = [each.text for each in elements(drawn, "text")]
    assert said == ["paper, split (a core)", "serial", "chunk", "trl", "0", TIMES_SERIAL, "2"]


def test_without_the_serial_mode_bars_are_tokens_a_second() -> None:
    bars = bars_of(results(serial=False))
    assert (bars.unit, bars.names, bars.widths) == ("tokens a second", ["chunk", "trl"], [100.0, 100.0])


def test_a_run_that_does_not_count_says_so() -> None:
    assert title(results(valid=False)) == "paper, split (a core), INVALID"


@pytest.mark.parametrize("recorded", RECORDED, ids=title)
def test_results_of_record_can_be_drawn(recorded: Results) -> None:
    bars = bars_of(recorded)
    assert bars.unit == TIMES_SERIAL
    assert all(low <= width <= high for low, width, high in zip(bars.below, bars.widths, bars.above, strict=True))


def test_the_picture_of_record_is_drawn_without_measuring(tmp_path: Path) -> None:
    main(["--plot", str(tmp_path / "ladder.svg")])
    assert (tmp_path / "ladder.svg").read_text() == PICTURE.read_text()
    headings = [each.text for each in ET.fromstring(PICTURE.read_text()).iter() if each.get("font-weight")]
    assert headings == [title(recorded) for recorded in RECORDED]


def test_a_picture_of_another_kind_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.svg, not ladder\.png"):
        main(["--plot", str(tmp_path / "ladder.png")])
    assert not list(tmp_path.iterdir())
