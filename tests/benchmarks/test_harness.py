"""What every bench stands on: fair turns, paired ratios, and parts of pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.harness import END, Spread, placed, require_writable, turns
from oppo.errors import ConfigError


def test_everyone_has_a_turn_in_each_round_and_none_always_follows_the_same_neighbour() -> None:
    order = list(turns("abc", 4))
    assert [number for number, _ in order] == [number for number in range(5) for _ in "abc"]
    assert ["".join(each for number, each in order if number == k) for k in range(5)] == [
        "cba", "abc", "cba", "abc", "cba",
    ]  # fmt: skip


def test_a_ratio_is_of_pairs_of_rounds_so_that_a_slow_minute_cancels() -> None:
    found = Spread.of_ratios([3.0, 30.0, 4.0], [2.0, 20.0, 2.0])
    assert found == Spread(1.5, 1.5, 2.0)
    assert str(found) == "1.50 (1.50 - 2.00)"
    with pytest.raises(ValueError, match="argument"):
        Spread.of_ratios([3.0], [2.0, 1.0])


def test_a_part_takes_the_place_of_the_older_one_between_its_own_marks() -> None:
    page = f"# oppo\n\n<!-- one -->\nold\n{END}\n\nmore\n\n<!-- two -->\n{END}\n"
    once = placed(page, "<!-- one -->\n", "new\n")
    assert once == page.replace("old", "new")
    assert placed(once, "<!-- two -->\n", "other\n") == once.replace("two -->\n", "two -->\nother\n")
    for lacking in ("# oppo\n", "<!-- one -->\n"):
        with pytest.raises(ValueError, match="no place"):
            placed(lacking, "<!-- one -->\n", "new\n")


def test_looking_whether_results_can_be_written_leaves_no_file_and_harms_none(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("kept")
    require_writable({"--json": old, "--plot": new, "--log": None})
    assert (old.read_text(), new.exists(), new.parent.is_dir()) == ("kept", False, True)
    for taken in (old / "results.json", tmp_path):
        with pytest.raises(ConfigError, match=f"--json: {taken}"):
            require_writable({"--json": taken})
