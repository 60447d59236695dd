"""The ladder: contestants and their pipes, workloads as files, requests, runs beside a commit's, and the page."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import CHECKOUT
from benchmarks.__main__ import bench
from benchmarks.harness import command, placed
from benchmarks.ladder import rounds
from benchmarks.ladder.__main__ import main
from benchmarks.ladder.contestant import Contestant
from benchmarks.ladder.directory import (
    BEYOND,
    EOS,
    FILLERS,
    Countdown,
    Facts,
    Files,
    LengthStatistics,
    announced,
    counting,
    drawn,
    files_of,
    language_of,
    workload_in,
    write_prompts,
)
from benchmarks.ladder.rounds import earlier
from benchmarks.ladder.show import PICTURE, ladders, table
from benchmarks.ladder.workloads import DISTILL, SMOKE, WORKLOADS, BenchWorkload, Lengths, Plan, Request, workloads_of
from oppo.errors import ConfigError, ModelLost, ProtocolError

HONEST = """
import json, sys
print(json.dumps({"ready": {"threads": 1}}), flush=True)
for line in sys.stdin:
    n = json.loads(line)["run"]
    step = {"seconds": 0.5, "tokens": 10, "samples": 2, "mean_length": 5}
    print(json.dumps({"steps": [step] * n, "peak_rss_mb": 12.5}), flush=True)
"""
DYING = 'print(\'{"ready": {}}\', flush=True); input(); raise SystemExit("no such kernel")'
FAILING = 'print(\'{"error": "too many tokens"}\', flush=True); input()'


def started(program: str, folder: Path, patience: float = 60.0) -> Contestant:
    return Contestant("peer", [sys.executable, "-c", program], log=folder / "peer.log", patience=patience)


def asked(program: str, folder: Path, patience: float = 60.0) -> None:
    with started(program, folder, patience) as contestant:
        contestant.ready()
        contestant.run(2)


def test_a_contestant_runs_steps_when_asked_and_ends_with_its_input(tmp_path: Path) -> None:
    with started(HONEST, tmp_path) as contestant:
        assert contestant.ready() == {"threads": 1}
        assert [step.seconds for step in contestant.run(2)] == [0.5, 0.5]
        assert [step.tokens for step in contestant.run(1)] == [10]
        assert contestant.peak_rss_mb == 12.5


@pytest.mark.parametrize(
    ("program", "patience", "named"),
    [(DYING, 60.0, "no such kernel"), (FAILING, 60.0, "too many tokens"), ("input()", 0.05, "answered")],
    ids=["dead", "failed", "silent"],
)
def test_a_contestant_that_gives_no_answer_is_lost(tmp_path: Path, program: str, patience: float, named: str) -> None:
    with pytest.raises(ModelLost, match=f"(?s)'peer'.*{named}"):
        asked(program, tmp_path, patience)


@pytest.mark.parametrize(
    "program",
    [*(f"print({said!r}, flush=True); input()" for said in ("loading...", "[1]", '{"steps": []}')),
     HONEST.replace("[step] * n", "[step]"), HONEST.replace('"tokens": 10', '"tokens": 0')],
    ids=["text", "list", "not ready", "too few steps", "nothing trained"],
)  # fmt: skip
def test_any_other_answer_breaks_the_protocol(tmp_path: Path, program: str) -> None:
    with pytest.raises(ProtocolError):
        asked(program, tmp_path)


def test_a_response_has_as_many_tokens_as_its_prompt_announces() -> None:
    language = Countdown(20)
    assert [len(language.response(number)) for number in (1, 2, 20)] == [1, 2, 20]
    assert language.response(1) == [EOS]
    assert max(language.response(20)) < language.number(20) == language.vocabulary - 1
    ids = [2, language.number(3), *language.response(3)]
    assert language.tokenizer(64)("f0 3 2 1 <eos>")["input_ids"] == ids


@pytest.mark.parametrize("workload", WORKLOADS.values(), ids=lambda each: each.name)
def test_announced_lengths_are_those_of_the_table(workload: BenchWorkload) -> None:
    lengths = announced(workload.lengths, 4000, seed=1)
    assert min(lengths) >= workload.lengths.shortest
    assert max(lengths) <= language_of(workload).numbers
    assert np.median(lengths) == pytest.approx(workload.lengths.median, rel=0.15)
    capped = float(np.mean([length >= workload.lengths.cap for length in lengths]))
    assert workload.capped[0] <= capped <= workload.capped[1]


def test_prompts_say_how_long_the_response_is_that_is_trained(tmp_path: Path) -> None:
    workload = replace(SMOKE, lengths=Lengths(median=20, sigma=0.5, cap=24))
    write_prompts(tmp_path / "prompts.jsonl", workload)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    assert len(rows) == workload.prompts
    language = language_of(workload)
    for row in rows:
        *fillers, number = row["tokens"]
        assert all(2 <= token < 2 + FILLERS for token in fillers)
        assert workload.prompt_tokens[0] <= len(row["tokens"]) <= workload.prompt_tokens[1]
        assert row["length"] == min(number - language.number(0), workload.lengths.cap)
    assert max(row["tokens"][-1] for row in rows) == language.number(workload.lengths.cap + BEYOND // 2)


def test_a_workload_is_read_back_from_its_directory_and_another_recipe_has_another(tmp_path: Path) -> None:
    files = files_of(SMOKE, tmp_path)
    assert workload_in(files.directory) == SMOKE
    assert files_of(SMOKE, tmp_path).directory == files.directory
    assert files_of(replace(SMOKE, chunk=9), tmp_path).directory != files.directory
    grouped = files_of(replace(SMOKE, samples=2), tmp_path)
    assert workload_in(grouped.directory).samples == 2
    assert [json.loads((each.directory / "spec.json").read_text()).get("samples") for each in (files, grouped)] == [
        None,
        2,
    ]
    taught = replace(SMOKE, teacher=SMOKE.models.reward)
    assert workload_in(files_of(taught, tmp_path).directory) == taught
    with pytest.raises(ConfigError, match=str(tmp_path)):
        workload_in(tmp_path)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--workload", "large"], "'large'"),
        (["--modes", "serial,adaptiv"], "'adaptiv'"),
        (["--modes", ","], "no mode"),
        (["--layout", "ring"], "'ring'"),
        (["--policy", "sglang"], "sglang"),
        (["--peer", "verl"], "'verl'"),
        (["--steps", "0"], "one step"),
        (["--warm-up", "0"], "warm-up"),
        (["--reward-architecture", "mamba"], "'mamba'"),
        (["--plot", "ladder.png"], "ladder.png"),
        (["--json", "/dev/null/results.json"], "--json"),
        (["--decoding", "--plot", "/dev/null/ladder.svg"], "--plot"),
        (["--peer", "trl"], "bench-peer PEER=trl"),
        (["--peer", "trl-grpo"], "'smoke' is trained by PPO"),
        (["--workload", "grpo", "--peer", "trl"], "'grpo' is trained by GRPO"),
        (["--workload", "distill", "--peer", "trl"], "'distill' is trained by distillation"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused_by_name_before_anything_runs(
    options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "CHECKOUT", tmp_path)  # has no environment of the peer
    workload = [] if "--workload" in options else ["--workload", "smoke"]
    assert command(bench, [*workload, "--cache", str(tmp_path / "cache"), *options]) == 2
    assert named in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_models_are_as_large_as_the_workloads_say() -> None:
    llama, recurrent = workloads_of(Request(workload="paper", reward_architecture="all"))
    sizes = [drawn(each, "reward", "meta").num_parameters() for each in (llama, recurrent)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    with torch.device("meta"):
        student = counting(DISTILL).num_parameters()
    assert drawn(DISTILL, "teacher", "meta").num_parameters() == pytest.approx(8 * student, rel=0.01)
    large = drawn(WORKLOADS["gpu"], "reward", "meta")
    assert large.dtype == torch.bfloat16
    assert large.num_parameters() == pytest.approx(7.07e9, rel=0.01)


def made(folder: Path, workload: BenchWorkload = SMOKE) -> Files:
    lengths = LengthStatistics(7, 20, 9, 0.0)
    (folder / "spec.json").write_text(json.dumps({"workload": workload.name, "recipe": asdict(workload)}))
    (folder / "prompts.jsonl").write_text("")
    return Files(folder, workload, Facts(lengths, {}))


def worktrees() -> str:
    return subprocess.run(["git", "worktree", "list"], cwd=CHECKOUT, capture_output=True, text=True, check=True).stdout


def test_a_commits_contestants_run_its_checkout_and_leave_none(tmp_path: Path) -> None:
    before, files = worktrees(), made(tmp_path)
    spec = json.loads((tmp_path / "spec.json").read_text())
    (tmp_path / "spec.json").write_text(json.dumps({**spec, "recipe": {**spec["recipe"], "newer": False}}))
    with earlier("HEAD", files, ["serial", "chunk"], "split", Plan()) as entries:
        assert [entry.name for entry in entries] == ["serial@HEAD", "chunk@HEAD"]
        for entry in entries:
            assert (entry.source / "benchmarks" / "ladder" / "worker.py").exists()
            directory = Path(entry.command[3])
            assert workload_in(directory) == SMOKE, "a field that it does not know is left out where it says nothing"
            assert (directory / "prompts.jsonl").exists()
    assert worktrees() == before
    assert not entries[0].source.exists()
    (tmp_path / "spec.json").write_text(json.dumps({**spec, "recipe": {**spec["recipe"], "newer": True}}))
    for revision, modes, named in (
        ("HEAD", ["serial"], r"HEAD.*newer"),
        ("no-such-commit", ["serial"], "no-such-commit"),
        ("HEAD", ["serial", "newest"], r"HEAD.*newest"),
    ):
        with pytest.raises(ConfigError, match=named), earlier(revision, files, modes, "split", Plan()):
            pass
    assert worktrees() == before


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
