"""A day with a GPU, tried on a CPU with tiny models: its parts, its limits, its plan, and what its page says."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
import torch

from benchmarks.gpu_day.__main__ import gpu_day
from benchmarks.gpu_day.plan import DEFAULT, PARTS, RESULTS, TAKES, Card, Part, figures, printed, recorded
from benchmarks.gpu_day.steps import FULL, LADDER, RULE, SMALL, fitted
from benchmarks.ladder.workloads import WORKLOADS
from benchmarks.peer.sweep import Peer
from oppo.errors import ConfigError
from oppo.simulate.profile import GPUS

BESIDE = ("equal", "first", "process")
PREDICTED = sorted(RESULTS.glob("prediction-*.json"))


def test_each_part_stands_beside_its_prediction_and_one_that_is_cut_or_fails_costs_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, limits = tmp_path / "day.json", cast("dict[str, Part]", PARTS)
    monkeypatch.setitem(limits, "tests", replace(PARTS["tests"], limit=0.01))
    chosen = "ladder,tests,full,update,decode,overlap,launches,agree,vllm,rule"
    assert gpu_day(device="cpu", parts=chosen, out=out, minutes=5) == 1
    parts = json.loads(out.read_text())["parts"]
    assert [*parts] == ["facts", *chosen.split(",")]
    assert parts["facts"]["flops"] > 0
    assert parts["ladder"]["rounds"] == 2
    for name, steps in (("ladder", LADDER), ("full", FULL), ("rule", RULE)):
        assert all(parts[name][f"{mode}, tokens a second"] > 0 for mode in steps.modes), name
        assert parts[name]["peak bytes, predicted"] > 0
    assert parts["tests"] == {"cut": "at its limit of 0 s"}
    assert "failed" in parts["vllm"], "which is in an environment of its own"
    assert all(parts["decode"][f"{rows}, ms{what}"] > 0 for rows in ("equal", "ragged") for what in ("", ", predicted"))
    beside = parts["overlap"]
    assert all(beside[f"{mode}, decode, s"] > 0 < beside[f"{mode}, score, s"] for mode in ("alone", *BESIDE))
    assert all(beside[f"{mode}, times as fast"] > 0 for mode in BESIDE)
    assert parts["launches"]["to the device"] == 0
    assert 0 <= parts["agree"]["mismatch/kl_current"] < 1e-9
    assert 0 < parts["update"]["mfu"] < 2
    shown = capsys.readouterr().out
    assert "| ladder | adaptive / serial | " in shown
    assert gpu_day(show=out) == 0
    again = capsys.readouterr().out
    assert all(line in shown for line in again.splitlines() if "/ serial |" in line)


def test_a_peer_without_an_environment_is_left_out_by_name_unless_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere(peer: Peer) -> Path:
        raise ConfigError(f"`make bench-peer PEER={peer.name}` makes it")

    monkeypatch.setattr(Peer, "interpreter", nowhere)
    monkeypatch.setattr("benchmarks.gpu_day.__main__.DEFAULT", ("peer", "agree"))
    assert gpu_day(device="cpu", out=tmp_path / "day.json") == 0
    parts = json.loads((tmp_path / "day.json").read_text())["parts"]
    assert parts["peer"] == {"not run": "`make bench-peer PEER=trl-grpo` makes it"}
    assert "mismatch/kl_current" in parts["agree"]
    with pytest.raises(ConfigError, match="makes it"):
        gpu_day(device="cpu", parts="agree,peer")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"parts": "decode,scoring"}, "--parts: expected some of facts, ladder, .*, got 'scoring'"),
        ({"plan": "h20"}, "no data sheet of a GPU 'h20'; expected one of a100-40gb"),
        pytest.param(
            {"device": "cuda:0", "parts": "facts"},
            "--device cuda:0: .*; cpu tries the command",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens where there is no GPU"),
        ),
    ],
)
def test_a_gpu_day_refuses_what_it_does_not_have(options: dict[str, str], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        gpu_day(**{"device": "cpu", "out": tmp_path / "day.json", **options})  # type: ignore[arg-type]  # options


def test_micro_batches_are_as_large_as_fit_and_what_ran_out_of_memory_is_refused() -> None:
    """An H100's ladder ran out with 16,384 tokens, which nothing had counted."""
    workload, device = WORKLOADS["gpu"], torch.device("cuda")
    fits, needed = fitted(workload, LADDER.deferring, device, GPUS["h100"].memory)
    assert fits.micro_batch_tokens == 8192
    assert needed == pytest.approx(recorded("NVIDIA H100 80GB HBM3")["ladder"]["peak bytes"], rel=0.01)
    with pytest.raises(
        ConfigError, match=r"cuda has 30\.0 GB free, and a step of gpu needs .*reward .*: take a larger"
    ):
        fitted(workload, LADDER.deferring, device, 30e9)


@pytest.mark.parametrize("file", PREDICTED, ids=lambda file: file.stem)
def test_the_plan_of_record_takes_twelve_minutes_at_most_and_is_what_the_simulator_says(file: Path) -> None:
    prediction = json.loads(file.read_text())
    assert all(prediction[name][TAKES] <= part.limit for name, part in PARTS.items())
    assert sum(prediction[name][TAKES] for name in DEFAULT) <= 12 * 60
    assert prediction["ladder"][TAKES] <= 6 * 60
    found = figures(Card(GPUS[file.stem.partition("-")[2]]).outcomes(WORKLOADS[SMALL.workload], SMALL.modes))
    assert {name: prediction["small"][name] for name in found} == pytest.approx(found, rel=1e-6)
    page = (RESULTS.parent / "gpu.md").read_text(encoding="utf-8")
    lines: Sequence[str] = printed(prediction, DEFAULT).splitlines()
    assert file.stem != "prediction-h100" or all(line in page for line in lines), "python -m benchmarks.gpu_day --plan"
