"""What a request of the ladder names, and what it is refused for before anything is made or measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.__main__ import main
from benchmarks.ladder import rounds
from benchmarks.ladder.workloads import PAPER, SMOKE, chosen, on_gpu


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
        (["--device", "cuda", "--actor", "70b"], "'70b'"),
        (["--device", "cuda", "--peer", "trl"], "scripted"),
        (["--plot", "ladder.png"], "ladder.png"),
        (["--json", "/dev/null/results.json"], "--json"),
        (["--engine", "--json", "/dev/null/results.json"], "--json"),
        (["--decoding", "--plot", "/dev/null/ladder.svg"], "--plot"),
        (["--peer", "trl"], "bench-peer"),
    ],
    ids=" ".join,
)
def test_what_cannot_be_measured_is_refused_by_name_before_anything_runs(
    options: list[str], named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rounds, "CHECKOUT", tmp_path)  # has no environment of the peer
    workload = [] if "--workload" in options else ["--workload", "smoke"]
    assert main([*workload, "--cache", str(tmp_path / "cache"), *options]) == 2
    assert named in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_names_keep_their_order_and_come_once() -> None:
    assert chosen("mode", "chunk, serial,chunk", ("serial", "chunk"), ("serial",)) == ["chunk", "serial"]
    assert chosen("mode", "all", ("serial", "chunk"), ("serial", "chunk")) == ["serial", "chunk"]


@pytest.mark.parametrize("size", ["0.5b", "1.5b"])
def test_the_workloads_of_a_gpu_are_scripted_and_large(size: str) -> None:
    workload = on_gpu(SMOKE, size)
    assert workload.models.scripted
    assert workload.models.reward.hidden > workload.models.actor.hidden > SMOKE.models.actor.hidden
    assert not on_gpu(PAPER, size).shares, "they depend on the machine"
