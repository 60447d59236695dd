"""``python -m benchmarks`` from end to end, on a workload that measures nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.decoding.cases import as_json, measure, show
from benchmarks.ladder import command as ladder
from benchmarks.ladder.command import chosen
from benchmarks.ladder.workloads import SMOKE
from benchmarks.request import Request
from tests.hf import tiny

KEYS = {
    "seconds_per_step",
    "tokens_per_second",
    "samples_per_second",
    "hidden_fraction",
    "decode_slowdown",
    "busy",
    "shares",
    "live_rows_per_decode_step",
    "cap_hit_rate",
    "deferrals",
    "peak_rss_mb",
    "verdict",
}


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("kind", [(), ("--engine",), ("--decoding",)], ids=["ladder", "engine", "decoding"])
def test_nothing_is_measured_whose_results_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, kind: tuple[str, ...]
) -> None:
    (tmp_path / "taken").write_text("a file, and no folder")
    assert main([*kind, option, str(tmp_path / "taken" / "results")]) == 2
    assert f"{option}: {tmp_path}/taken/results cannot be written, so nothing is measured" in capsys.readouterr().err
    assert main([*kind, option, str(tmp_path)]) == 2
    assert "Is a directory" in capsys.readouterr().err


def test_looking_whether_results_can_be_written_leaves_no_file_and_harms_none(tmp_path: Path) -> None:
    old, new = tmp_path / "old.json", tmp_path / "folder" / "new.json"
    old.write_text("kept")
    Request(json=old).require_writable()
    Request(json=new).require_writable()
    assert (old.read_text(), new.exists(), new.parent.is_dir()) == ("kept", False, True)


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_the_smoke_workload_runs_through_the_whole_ladder_s_machinery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, picture = tmp_path / "results" / "smoke.json", tmp_path / "results" / "smoke.svg"
    options = ["--workload", "smoke", "--layout", "split", "--modes", "serial,fixed", "--steps", "1", "--rounds", "1"]
    options += ["--warm-up", "1"]
    options += ["--json", str(results), "--cache", str(tmp_path / "cache")]
    assert main([*options, "--plot", str(picture)]) == 0
    printed = capsys.readouterr()
    told = json.loads(results.read_text())
    assert (told["workload"], told["layout"], told["valid"], told["faults"]) == ("smoke", "split", True, [])
    assert {"machine", "threads"} <= told.keys()
    assert set(told["modes"]) == {"serial", "fixed"}
    for figures in told["modes"].values():
        assert figures.keys() >= KEYS
        assert len(figures["seconds_per_step"]) == 1
        assert figures["as_announced"] == 1.0
        assert f"{figures['verdict']['bottleneck']}-bound: {figures['verdict']['sentence'][:30]}" in printed.out
        assert figures["verdict"]["limit"] >= 1.0
        assert figures["peak_rss_mb"] > 50
    assert told["modes"]["serial"]["hidden_fraction"] == pytest.approx(0.0, abs=0.05)
    assert told["modes"]["serial"]["decode_slowdown"] == pytest.approx(1.0)
    assert told["modes"]["fixed"]["deferrals"] == {"mean": 2.0, "most": 2.0}
    assert set(told["ratios"]) == set(told["ratio_ranges"]) == {"fixed/serial"}
    assert told["threads"]["serial"]["score"]["threads"] == 1
    assert "100.0% as announced" in printed.out
    assert "█ " in printed.out
    assert "valid: shares and lengths" in printed.out
    assert "teaching the actor to count down" in printed.err
    assert picture.read_text().startswith("<svg")
    assert told["calibration"] is None, "the workload states no shares"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--workload", "large"], "there is no workload 'large'; expected all, or some of paper"),
        (["--modes", "serial,adaptiv"], "there is no mode 'adaptiv'"),
        (["--layout", "ring"], "there is no layout 'ring'"),
        (["--policy", "sglang"], "there is no engine 'sglang'; expected one of transformers, vllm"),
        (["--peer", "verl"], "there is no peer 'verl'; expected 'trl'"),
        (["--steps", "0"], "at least one step and one round"),
        (["--warm-up", "0"], "at least one step of warm-up"),
        (["--device", "cuda", "--actor", "70b"], "there is no actor '70b' for a GPU"),
        (["--device", "cuda", "--peer", "trl"], "lengths are scripted"),
        (["--modes", ","], "no mode is named"),
    ],
)
def test_what_cannot_be_measured_is_said_before_anything_runs(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*options]) == 2
    assert said in capsys.readouterr().err


def test_a_peer_that_is_not_installed_is_missed_before_a_workload_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder, "CHECKOUT", tmp_path)
    assert main(["--peer", "trl", "--workload", "smoke", "--cache", str(tmp_path / "cache")]) == 2
    assert "the peer has no environment" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_a_picture_of_another_kind_is_refused_before_anything_is_made(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--workload", "smoke", "--cache", str(tmp_path / "cache")]
    assert main([*options, "--plot", str(tmp_path / "ladder.png")]) == 2
    assert "ends in .svg, not ladder.png" in capsys.readouterr().err
    assert not (tmp_path / "cache").exists()


def test_names_keep_their_order_and_come_once() -> None:
    assert chosen("mode", "chunk, serial,chunk", ("serial", "chunk"), ("serial",)) == ["chunk", "serial"]
    assert chosen("mode", "all", ("serial", "chunk"), ("serial", "chunk")) == ["serial", "chunk"]


def test_decoding_is_compared_and_written(tmp_path: Path) -> None:
    shapes, batches = {"tiny": SMOKE.models.actor}, {"3 ragged": [5, 2, 9], "1": [6]}
    found = tiny.apart(measure)(1, shapes, batches)
    Request(json=tmp_path / "decoding.json").keep(as_json(found, 1))
    cases = json.loads((tmp_path / "decoding.json").read_text())["cases"]
    assert [case["batch"] for case in cases] == ["3 ragged", "1"]
    assert all(len(case["found"]["ours"]) == 1 and case["ratio"][0] > 0 for case in cases)
    assert show(found).count("tiny") == 2
