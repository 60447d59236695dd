"""The picture of a ladder: what is drawn, from results as they are written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import cast

import pytest

from benchmarks.ladder.__main__ import main
from benchmarks.ladder.of_record import PICTURE, ladders
from benchmarks.ladder.plot import PEERS, TIMES_SERIAL, Results, bars_of, draw, title
from oppo.errors import ConfigError

RECORDED = cast("list[Results]", ladders())


@dataclass
class Drawn:
    """Axes that keep what is drawn on them."""

    said: dict[str, object] = field(default_factory=dict)

    def barh(
        self,
        y: Sequence[str],
        width: Sequence[float],
        *,
        height: float,
        color: Sequence[str],
        xerr: Sequence[Sequence[float]],
        capsize: int,
    ) -> None:
        self.said |= {"y": y, "width": width, "xerr": xerr, "color": color}

    def invert_yaxis(self) -> None:
        self.said["inverted"] = True

    def axvline(self, x: float, *, color: str, linewidth: float) -> None:
        self.said["line"] = x

    def set_xlim(self, left: float, right: float) -> None:
        self.said["xlim"] = (left, right)

    def set_axis_off(self) -> None:
        raise AssertionError("nothing is empty here")

    def set_title(self, label: str, *, fontsize: int) -> None:
        self.said["title"] = label

    def set_xlabel(self, xlabel: str) -> None:
        self.said["xlabel"] = xlabel


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


def test_bars_are_in_times_of_the_serial_step_with_whiskers_to_the_worst_and_the_best_round() -> None:
    axes = Drawn()
    draw(axes, title(results()), bars_of(results()), 2.0)
    assert axes.said["y"] == ["serial", "chunk", "trl"]
    assert axes.said["width"] == [1.0, 1.25, 0.5]
    assert axes.said["xerr"] == [[0.0, 0.25, 0.25], [0.0, 0.5, 0.5]]
    assert cast("list[str]", axes.said["color"])[2] == PEERS
    assert (axes.said["line"], axes.said["xlim"]) == (1.0, (0.0, 2.0))
    assert axes.said["xlabel"] == TIMES_SERIAL


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
    if find_spec("matplotlib") is None:
        with pytest.raises(ConfigError, match="make bench"):
            main(["--plot", str(tmp_path / "ladder.png")])
    else:
        main(["--plot", str(tmp_path / "ladder.png")])
        assert (tmp_path / "ladder.png").read_bytes()[:4] == b"\x89PNG"
    assert PICTURE.exists()
