"""What is learned at each lag: the table of the results of record, and a run that writes both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import learning
from benchmarks.harness import END
from benchmarks.learning import BEGIN, LAGS, RESULTS, Found, Outcome, Task, content, main, reached

EMPTY = f"# Learning\n\n{BEGIN}{END}\n"


def of_record(page: str) -> str:
    return page.partition(BEGIN)[2].partition(END)[0]


def test_the_page_is_made_of_the_results_of_record() -> None:
    results = json.loads((RESULTS / "learning.json").read_text(encoding="utf-8"))
    assert of_record((RESULTS / "learning.md").read_text(encoding="utf-8")) == content(results)
    found = Found.of(results)
    assert len(found.outcomes) == 3
    for lags in found.outcomes.values():
        assert {lag: len(each) for lag, each in lags.items()} == dict.fromkeys(LAGS, results["seeds"])
        assert sum(each.after - each.before for each in lags[0]) > 0


def test_lags_are_compared_by_seed_in_parts_of_what_none_gained() -> None:
    runs = {
        lag: [Outcome(0.0, 1.0 - lag / 10 + seed / 10, 2.0, lag, [0, 0, 0.9, 0.9, 0.9], [1.0] * 5) for seed in (0, 1)]
        for lag in LAGS
    }
    table = Found({"sums": runs}).table().splitlines()
    assert table[2] == "| sums | 0 | 0.00 | 0.00 | 1.05 | - | 2.0 | 160 | 5.0 | 5.0 |"
    assert "| -10% (-10% to -10%) |" in table[3]
    assert reached(runs[0][0], 0.5) == (4 * 32, 4.0)
    assert reached(runs[0][0], 0.95) == (float("inf"), float("inf"))


def test_a_run_writes_results_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Task("tool", "sums", 2, 1e-2, learning.beginning, lambda _: learning.checked(), tool=True)
    monkeypatch.setattr(learning, "tasks", lambda: [shown])
    monkeypatch.setattr(learning, "HELD_OUT", 8)
    (tmp_path / "learning.md").write_text(EMPTY)
    assert main(["--seeds", "1", "--steps", "3", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "learning.json").read_text())
    assert of_record((tmp_path / "learning.md").read_text()) == content(results)
    staleness = [each[0].staleness for each in Found.of(results).outcomes["tool"].values()]
    assert staleness == pytest.approx([0, 2 / 3, 1])
    assert main(["--seeds", "0", "--out", str(tmp_path)]) == 2
