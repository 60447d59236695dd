"""Runs of the ladder: its own, and modes as another commit runs them, on what it understands of a workload."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from benchmarks.__main__ import bench
from benchmarks.harness import command
from benchmarks.ladder.directory import Facts, Files, LengthStatistics, workload_in
from benchmarks.ladder.rounds import earlier
from benchmarks.ladder.workloads import SMOKE, BenchWorkload, Plan
from oppo.errors import ConfigError


def made(folder: Path, workload: BenchWorkload = SMOKE) -> Files:
    lengths = LengthStatistics(7, 20, 9, 0.0, 1.0)
    (folder / "spec.json").write_text(json.dumps({"workload": workload.name, "recipe": asdict(workload)}))
    (folder / "prompts.jsonl").write_text("")
    return Files(folder, workload, Facts(lengths, lengths, {}))


def worktrees() -> str:
    return subprocess.run(["git", "worktree", "list"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout


def test_its_contestants_run_its_checkout_and_leave_none(tmp_path: Path) -> None:
    before = worktrees()
    with earlier("HEAD", made(tmp_path), ["serial", "chunk"], "split", Plan()) as entries:
        assert [entry.name for entry in entries] == ["serial@HEAD", "chunk@HEAD"]
        for entry in entries:
            assert entry.source != CHECKOUT
            assert (entry.source / "benchmarks" / "ladder" / "worker.py").exists()
            directory = Path(entry.command[3])
            assert workload_in(directory) == SMOKE
            assert (directory / "prompts.jsonl").exists()
    assert worktrees() == before
    assert not entries[0].source.exists()


def test_a_field_that_it_does_not_know_is_left_out_where_it_says_nothing(tmp_path: Path) -> None:
    files = made(tmp_path)
    spec = json.loads((tmp_path / "spec.json").read_text())
    (tmp_path / "spec.json").write_text(json.dumps({**spec, "recipe": {**spec["recipe"], "newer": False}}))
    with earlier("HEAD", files, ["serial"], "split", Plan()) as (entry,):
        assert workload_in(Path(entry.command[3])) == SMOKE
    (tmp_path / "spec.json").write_text(json.dumps({**spec, "recipe": {**spec["recipe"], "newer": True}}))
    with (
        pytest.raises(ConfigError, match=r"HEAD.*newer"),
        earlier("HEAD", files, ["serial"], "split", Plan()),
    ):
        pass


@pytest.mark.parametrize(
    ("revision", "modes", "named"),
    [("no-such-commit", ["serial"], "no-such-commit"), ("HEAD", ["serial", "newest"], r"HEAD.*newest")],
)
def test_what_it_cannot_run_is_refused_by_name(tmp_path: Path, revision: str, modes: list[str], named: str) -> None:
    before = worktrees()
    with pytest.raises(ConfigError, match=named), earlier(revision, made(tmp_path), modes, "split", Plan()):
        pass
    assert worktrees() == before


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


@pytest.mark.deep
@pytest.mark.timeout(600)
def test_the_smoke_workload_runs_through_the_whole_ladder_s_machinery(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    results, picture = tmp_path / "results" / "smoke.json", tmp_path / "results" / "smoke.svg"
    options = ["--workload", "smoke", "--layout", "split", "--modes", "serial,fixed", "--steps", "1", "--rounds", "1"]
    options += ["--warm-up", "1"]
    options += ["--json", str(results), "--cache", str(tmp_path / "cache")]
    assert command(bench, [*options, "--plot", str(picture)]) == 0
    printed = capsys.readouterr()
    told = json.loads(results.read_text())
    assert (told["workload"], told["layout"], told["valid"], told["faults"]) == ("smoke", "split", True, [])
    assert {"machine", "threads"} <= told.keys()
    assert set(told["modes"]) == {"serial", "fixed"}
    for figures in told["modes"].values():
        assert figures.keys() >= KEYS
        assert len(figures["seconds_per_step"]) == 1
        assert figures["as_announced"] == 1.0
        assert figures["verdict"]["limit"] >= 1.0
        assert figures["peak_rss_mb"] > 50
    assert told["modes"]["serial"]["hidden_fraction"] == pytest.approx(0.0, abs=0.05)
    assert told["modes"]["serial"]["decode_slowdown"] == pytest.approx(1.0)
    assert told["modes"]["fixed"]["deferrals"] == {"mean": 2.0, "most": 2.0}
    assert set(told["ratios"]) == set(told["ratio_ranges"]) == {"fixed/serial"}
    assert told["threads"]["serial"]["score"]["threads"] == 1
    assert "serial" in printed.out
    assert "round 1/1" in printed.err
    assert picture.read_text().startswith("<svg")
    assert told["calibration"] is None, "the workload states no shares"
