"""The table of ``docs/performance.md`` is that of the results of record, and what it claims is in them."""

from __future__ import annotations

from benchmarks import CHECKOUT
from benchmarks.ladder.of_record import ladders, table

PAGE = CHECKOUT / "docs" / "performance.md"


def test_the_page_shows_the_results_of_record() -> None:
    page = PAGE.read_text(encoding="utf-8")
    shown = page.split("<!-- python -m benchmarks.ladder -->\n")[1].split("\n<!-- end -->")[0]
    assert shown == table(ladders()), "run: python -m benchmarks.ladder"


def test_every_result_of_record_says_what_it_was_measured_on() -> None:
    for each in ladders():
        assert each["machine"]["cores"] == 2, each["workload"]
        assert each["plan"]["rounds"] >= 2, each["workload"]
        assert each["valid"] or each["faults"], each["workload"]
