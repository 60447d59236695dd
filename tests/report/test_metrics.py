"""The metrics of a run under TRL's names and verl's, and read back under oppo's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from oppo.cli import DONE
from oppo.report.metrics import metric, metrics_of
from oppo.run.train import train
from oppo.simulate.calibrate import RunRecord
from oppo.testing import Recorder
from tests.kit.workplace import furnish, oppo, resume
from tests.report.tracked import board

GROUPS = (
    "step.algorithm=grpo", "algorithm.samples=2", "step.batch=2", "step.overcommit=1", "run.steps=2", "run.panel=off",
)  # fmt: skip

# Names of TRL's GRPOTrainer
TRL = {
    "reward", "reward_std", "frac_reward_zero_std", "kl", "entropy", "clip_ratio/region_mean", "grad_norm", "step_time",
    "completions/mean_length", "completions/min_length", "completions/max_length", "completions/clipped_ratio",
    "learning_rate",
}  # fmt: skip

# Names of verl
VERL = {
    "actor/pg_loss", "actor/kl_loss", "actor/entropy", "actor/ppo_kl", "actor/pg_clipfrac", "actor/grad_norm",
    "actor/lr", "critic/score/mean", "critic/score/min", "critic/score/max", "critic/rewards/mean",
    "critic/advantages/mean", "critic/advantages/min", "critic/advantages/max", "response_length/mean",
    "response_length/max", "response_length/min", "response_length/clip_ratio", "prompt_length/mean",
    "prompt_length/max", "prompt_length/min", "timing_s/gen", "timing_s/update_actor", "timing_s/step",
    "timing_s/update_weights", "perf/total_num_tokens", "perf/mfu/actor",
}  # fmt: skip

# Those of verl's critic
CRITIC = {
    "critic/vf_loss", "critic/vf_clipfrac", "critic/grad_norm", "critic/returns/mean", "critic/values/mean",
    "critic/values/min", "critic/values/max", "critic/vf_explained_var",
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("names"))


def lines(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("names", "settings", "expected"),
    [("trl", GROUPS, TRL), ("verl", GROUPS, VERL), ("verl", GROUPS[-2:], VERL | CRITIC)],
    ids=["grpo-trl", "grpo-verl", "ppo-verl"],
)
def test_a_run_is_written_shown_and_read_under_the_names_that_are_chosen(
    folder: Path, names: str, settings: tuple[str, ...], expected: set[str]
) -> None:
    name = f"{names}-{len(settings)}"
    seen = Recorder()
    overrides = [*settings, f"run.name={name}", f"run.metric_names={names}", 'run.track=["tensorboard"]']
    run = train(folder / "config.toml", overrides, observers=[seen]).path
    written = lines(run)
    for line, report in zip(written, seen.reports, strict=True):
        assert expected <= line.keys()
        assert report.metrics.keys() <= line.keys(), "observers are told the same names"
    shown = board(run / "tensorboard")
    assert expected <= shown.keys()
    read = metrics_of(run)
    assert all(metric(each) for line in read for each in line)
    assert all(0 < line[f"perf/mfu/{kind}"] <= 1.2 for line in read for kind in ("decode", "score", "update"))  # type: ignore[operator] # numbers
    assert [line["objective/scores"] for line in read] == [line["score"] for line in written]
    assert len(RunRecord.read(run).steps) == 2, "a simulation is calibrated on it"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert "nats a rollout: objective/kl<" in page
    assert "exposed scoring" in page
    assert "Model FLOPs utilisation" in page
    summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
    assert summary["objective/kl"]["last"] == pytest.approx(sum(line["objective/kl"] or 0 for line in read) / 2)


def test_ppo_keeps_the_names_of_trls_ppo_and_a_resumed_run_may_change_them(folder: Path) -> None:
    assert oppo(folder, "", "run.name=changed", *GROUPS[-2:], "run.checkpoint_every=2") == DONE
    assert resume(folder, "changed", "run.steps=4", "run.metric_names=verl") == DONE
    first, _, third, _ = lines(folder / "runs" / "changed")
    assert {"objective/scores", "policy/clipfrac_avg", "loss/value_avg"} <= first.keys()
    assert third.keys() >= VERL | CRITIC
    before, _, after, _ = metrics_of(folder / "runs" / "changed")
    assert before.keys() - after.keys() <= {"response_length/mean_uncapped"}
