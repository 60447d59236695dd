"""What a request of the ladder names, and what it is refused for before anything is made or measured."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks.__main__ import bench
from benchmarks.harness import command
from benchmarks.ladder import rounds
from benchmarks.ladder.directory import config_of, language_of, scalar_model
from benchmarks.ladder.workloads import (
    CAPPED,
    DISTILL,
    PAPER,
    SMOKE,
    BenchWorkload,
    Request,
    chosen,
    on_gpu,
    workloads_of,
)


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
        (["--reward-architecture", "mamba"], "'mamba'"),
        (["--device", "cuda", "--peer", "trl"], "scripted"),
        (["--plot", "ladder.png"], "ladder.png"),
        (["--json", "/dev/null/results.json"], "--json"),
        (["--engine", "--json", "/dev/null/results.json"], "--json"),
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


def test_names_keep_their_order_and_come_once() -> None:
    assert chosen("mode", "chunk, serial,chunk", ("serial", "chunk"), ("serial",)) == ["chunk", "serial"]
    assert chosen("mode", "all", ("serial", "chunk"), ("serial", "chunk")) == ["serial", "chunk"]


@pytest.mark.parametrize("workload", [PAPER, CAPPED], ids=lambda each: each.name)
def test_a_recurrent_reward_model_is_as_large_as_the_llama_in_its_place(workload: BenchWorkload) -> None:
    request = Request(workload=workload.name, reward_architecture="all")
    llama, recurrent = workloads_of(request)
    assert (llama, recurrent.name) == (workload, f"{workload.name}-qwen3_5_text")
    with torch.device("meta"):
        sizes = [
            scalar_model(each.models.reward, language_of(each).vocabulary, each.positions).num_parameters()
            for each in (llama, recurrent)
        ]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    assert on_gpu(recurrent, "0.5b").models.reward.architecture == "qwen3_5_text"


def test_the_teacher_of_a_distillation_has_eight_times_the_parameters_of_its_student() -> None:
    vocabulary = language_of(DISTILL).vocabulary
    with torch.device("meta"):
        student, teacher = (
            LlamaForCausalLM(config_of(DISTILL.shape(role), vocabulary, DISTILL.positions)).num_parameters()
            for role in DISTILL.roles
        )
    assert teacher == pytest.approx(8 * student, rel=0.01)
    assert on_gpu(DISTILL, "0.5b").teacher == on_gpu(DISTILL, "0.5b").models.reward


@pytest.mark.parametrize("size", ["0.5b", "1.5b"])
def test_the_workloads_of_a_gpu_are_scripted_and_large(size: str) -> None:
    workload = on_gpu(SMOKE, size)
    assert workload.models.scripted
    assert workload.models.reward.hidden > workload.models.actor.hidden > SMOKE.models.actor.hidden
    assert not on_gpu(PAPER, size).shares, "they depend on the machine"
