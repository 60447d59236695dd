"""Modes as another commit runs them: its own workers, on what it understands of a workload."""

from __future__ import annotations

import json
import subprocess
from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks import CHECKOUT
from benchmarks.ladder.against import earlier
from benchmarks.ladder.directory import Facts, Files, LengthStatistics, workload_in
from benchmarks.ladder.rounds import Plan
from benchmarks.ladder.workloads import SMOKE, BenchWorkload
from oppo.errors import ConfigError


def made(folder: Path, workload: BenchWorkload = SMOKE) -> Files:
    """Return a workload's directory without models."""
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


def test_a_field_that_it_does_not_know_is_left_out_where_it_says_nothing(
    tmp_path: Path,
) -> None:
    files = made(tmp_path)
    spec = json.loads((tmp_path / "spec.json").read_text())
    (tmp_path / "spec.json").write_text(json.dumps({**spec, "recipe": {**spec["recipe"], "newer": False}}))
    with earlier("HEAD", files, ["serial"], "split", Plan()) as (entry,):
        assert workload_in(Path(entry.command[3])) == SMOKE
    (tmp_path / "spec.json").write_text(json.dumps({**spec, "recipe": {**spec["recipe"], "newer": True}}))
    with (
        pytest.raises(ConfigError, match="commit HEAD cannot run workload smoke: it knows no newer"),
        earlier("HEAD", files, ["serial"], "split", Plan()),
    ):
        pass


@pytest.mark.parametrize(
    ("revision", "modes", "sentence"),
    [
        ("no-such-commit", ["serial"], "commit 'no-such-commit' cannot be checked out: .*invalid reference"),
        ("HEAD", ["serial", "newest"], "commit HEAD has no mode newest; choose --modes that both have"),
    ],
)
def test_what_it_cannot_run_is_refused_by_name(tmp_path: Path, revision: str, modes: list[str], sentence: str) -> None:
    before = worktrees()
    with pytest.raises(ConfigError, match=sentence), earlier(revision, made(tmp_path), modes, "split", Plan()):
        pass
    assert worktrees() == before


def test_without_a_commit_there_are_no_further_contestants(tmp_path: Path) -> None:
    with earlier(None, made(tmp_path), ["serial"], "split", Plan()) as entries:
        assert entries == []
