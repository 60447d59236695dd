"""The table and the picture of ``docs/performance.md`` are those of the results of record."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from benchmarks import CHECKOUT
from benchmarks.harness import placed
from benchmarks.ladder.__main__ import main
from benchmarks.ladder.show import (
    LEFT,
    OURS,
    PEERS,
    PICTURE,
    RIGHT,
    WIDTH,
    Results,
    bars_of,
    draw,
    ladders,
    table,
    title,
)
from oppo.errors import ConfigError

PAGE = CHECKOUT / "docs" / "performance.md"
BEGIN = "<!-- python -m benchmarks.ladder -->\n"


def test_the_page_shows_the_results_of_record() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert placed(page, BEGIN, f"{table(ladders())}\n") == page, "run: python -m benchmarks.ladder"


def test_the_picture_of_record_is_drawn_without_measuring(tmp_path: Path) -> None:
    main(["--plot", str(tmp_path / "ladder.svg")])
    assert (tmp_path / "ladder.svg").read_text() == PICTURE.read_text()
    with pytest.raises(ConfigError, match=r"ladder\.png"):
        main(["--plot", str(tmp_path / "ladder.png")])


def test_every_result_of_record_says_what_it_was_measured_on() -> None:
    for each in ladders():
        assert each["machine"]["cores"] == 2, each["workload"]
        assert each["plan"]["rounds"] >= 2, each["workload"]
        assert each["valid"] or each["faults"], each["workload"]


def results(*, valid: bool = True, serial: bool = True) -> Results:
    ratios = {"chunk/serial": 1.25, "trl/serial": 0.5} if serial else {}
    names = ("serial", "chunk", "trl") if serial else ("chunk", "trl")
    return {
        "workload": "paper",
        "layout": "split",
        "valid": valid,
        "machine": {"cpu": "a core"},
        "modes": {name: {"tokens_per_second": 100.0} for name in names},
        "ratios": ratios,
        "ratio_ranges": {name: [ratio - 0.25, ratio + 0.5] for name, ratio in ratios.items()},
    }


def test_bars_are_in_times_of_the_serial_step_with_whiskers_to_the_worst_and_the_best_round() -> None:
    drawn = ET.fromstring(f"<svg>{draw(title(results()), bars_of(results()), 2.0)}</svg>")
    scale = (WIDTH - LEFT - RIGHT) / 2.0
    bars = list(drawn.iter("rect"))
    assert [float(bar.get("width", "nan")) for bar in bars] == pytest.approx([scale, 1.25 * scale, 0.5 * scale])
    assert [bar.get("fill") for bar in bars] == [OURS, OURS, PEERS]
    across = [
        (float(line.get("x1", "nan")), float(line.get("x2", "nan")))
        for line in drawn.iter("line")
        if line.get("y1") == line.get("y2")
    ]
    assert across[1] == pytest.approx((1.0 * scale, 1.75 * scale), abs=0.1)
    assert across[2] == pytest.approx((0.25 * scale, 1.0 * scale), abs=0.1)


def test_without_the_serial_mode_bars_are_tokens_a_second_and_a_run_that_does_not_count_says_so() -> None:
    bars = bars_of(results(serial=False))
    assert (bars.unit, bars.names, bars.widths) == ("tokens a second", ["chunk", "trl"], [100.0, 100.0])
    assert title(results(valid=False)).endswith("INVALID")
