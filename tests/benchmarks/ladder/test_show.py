"""The table and the picture of ``benchmarks/results/README.md`` are those of the results of record."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from benchmarks.harness import placed
from benchmarks.ladder.__main__ import main
from benchmarks.ladder.show import PICTURE, ladders, table
from oppo.errors import ConfigError

PAGE = CHECKOUT / "benchmarks" / "results" / "README.md"
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
