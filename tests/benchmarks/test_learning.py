"""What is learned at each lag: the table of the results of record, and a run that writes both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import learning
from benchmarks.harness import END, command
from benchmarks.learning import BEGIN, LAGS, RESULTS, Found, Task, content, make

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


def test_a_run_writes_results_and_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Task("tool", "sums", 2, 1e-2, learning.beginning, lambda _: learning.checked(), tool=True)
    monkeypatch.setattr(learning, "tasks", lambda: [shown])
    monkeypatch.setattr(learning, "HELD_OUT", 8)
    (tmp_path / "learning.md").write_text(EMPTY)
    assert command(make, ["--seeds", "1", "--steps", "3", "--out", str(tmp_path)]) == 0
    results = json.loads((tmp_path / "learning.json").read_text())
    assert of_record((tmp_path / "learning.md").read_text()) == content(results)
    staleness = [each[0].staleness for each in Found.of(results).outcomes["tool"].values()]
    assert staleness == pytest.approx([0, 2 / 3, 1])
    assert command(make, ["--seeds", "0", "--out", str(tmp_path)]) == 2
