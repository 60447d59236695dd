"""Benchmarks of parts, run once: what they count, not how long it takes; and what all of them share."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import cast

import pytest
import torch

from benchmarks.decoding import as_json, compare_decoding, measure, show
from benchmarks.gpu_day import PARTS, gpu_day
from benchmarks.harness import END, Spread, placed, require_writable, turns
from benchmarks.ladder.workloads import SMOKE
from oppo.errors import ConfigError
from tests.hf import tiny


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


@tiny.apart
def test_both_are_timed_in_turns_and_their_figures_belong_together() -> None:
    # generate, ours; ours, generate; ...: with a second between two of them
    clock = itertools.accumulate(itertools.cycle([1.0, 4.0, 1.0, 2.0, 1.0, 2.0, 1.0, 4.0])).__next__
    before = torch.get_num_threads()
    found = compare_decoding(tiny.causal(), lengths=[9, 3, 20], prompts=[4, 17, 8], rounds=3, clock=clock)
    assert torch.get_num_threads() == before
    assert (found.batch, found.tokens) == (3, 32)
    assert (found.ours, found.generate) == ((16.0,) * 3, (8.0,) * 3)
    assert found.ratio == Spread(2.0, 2.0, 2.0)


def test_every_case_is_compared_shown_and_written_as_files_of_record_are() -> None:
    found = tiny.apart(measure)(1, {"tiny": SMOKE.models.actor}, {"3 ragged": [5, 2, 9], "1": [6]})
    cases = as_json(found, 1)["cases"]
    assert isinstance(cases, list)
    assert [case["batch"] for case in cases] == ["3 ragged", "1"]
    assert all(len(case["found"]["ours"]) == 1 and case["ratio"][0] > 0 for case in cases)
    assert show(found).count("tiny") == 2


def test_each_part_stands_beside_its_prediction_and_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.set_num_threads(1)
    out = tmp_path / "day.json"
    assert gpu_day(device="cpu", parts="decode,launches,agree,score,update", out=out) == 0
    parts = json.loads(out.read_text())["parts"]
    assert list(parts) == ["facts", "decode", "launches", "agree", "score", "update"]
    assert parts["facts"]["flops"] > 0
    assert all(parts["decode"][f"{rows}, {what}"] > 0 for rows in ("equal", "ragged") for what in ("ms", "predicted"))
    assert parts["launches"]["to the device"] == 0
    assert 0 <= parts["agree"]["mismatch/kl_current"] < 1e-9
    assert parts["agree"]["policy/clipfrac_avg"] == 0
    for name in ("score", "update"):
        assert 0 < parts[name]["mfu"] < 2
        assert parts[name]["predicted"] > 0
    assert parts["update"]["predicted bytes"] > 0
    assert "tokens a second" in capsys.readouterr().out


def test_a_part_that_fails_or_comes_too_late_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "day.json"
    monkeypatch.setitem(cast("dict[str, object]", PARTS), "decode", lambda day: 1 / 0)
    assert gpu_day(device="cpu", parts="decode,score", out=out) == 1
    parts = json.loads(out.read_text())["parts"]
    assert parts["decode"] == {"failed": "ZeroDivisionError: division by zero"}
    assert "mfu" in parts["score"]
    assert gpu_day(device="cpu", parts="score", minutes=1e-9, out=out) == 0
    assert json.loads(out.read_text())["parts"]["score"] == {"left out": "1e-09 minutes were over"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": "decode,scoring"}, "--parts: expected some of facts, tests, .*, got 'scoring'"),
        ({"actor": "70b"}, "--actor: expected one of 0.5b, 1.5b, got '70b'"),
    ],
)
def test_what_it_does_not_have_is_refused(options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        gpu_day(device="cpu", out=tmp_path / "day.json", **options)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no CUDA device")
def test_without_a_gpu_it_says_how_to_try_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no 'cuda:0' here; cpu tries the command"):
        gpu_day(out=tmp_path / "day.json")
