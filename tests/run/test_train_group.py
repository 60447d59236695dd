"""``oppo train`` without a critic: groups from settings, carried and trained whole, killed and resumed."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file

from oppo.cli import DONE
from oppo.run.train import FINAL
from tests.workplace import furnish, oppo, records, resume, start

GROUPS = (
    "algorithm.samples=3", "step.batch=3", "step.overcommit=2", "run.steps=4", "run.deterministic=true",
    "run.panel=off", "rewards.0.source=reward.py:short",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("groups"))


@pytest.mark.parametrize(
    ("algorithm", "further"),
    [("grpo", ("algorithm.ratio_base=proximal",)), ("rloo", ()), ("dr_grpo", ("models.reference=actor",))],
)
def test_groups_are_trained_whole_and_no_critic_is_loaded_or_saved(
    folder: Path, algorithm: str, further: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    name = f"plain-{algorithm}"
    code = oppo(folder, "", *GROUPS, f"step.algorithm={algorithm}", *further, f"run.name={name}")
    said = capsys.readouterr().err
    assert code == DONE, said
    assert "loading the critic" not in said
    lines = records(folder, name, "metrics.jsonl")
    assert [line["trained"] for line in lines] == [9] * 4
    assert any(line["deferral/deferred"] for line in lines)
    for line in lines:
        assert not {"loss/value_avg", "train/critic_grad_norm", "val/clipfrac_avg"} & line.keys()
        assert {"objective/kl", "objective/group_std", "policy/kl_avg"} <= line.keys()
        assert line["objective/kl_coef"] == (0.05 if algorithm == "rloo" else 0), "GRPO has its KL in the loss"
    final = folder / "runs" / name / FINAL
    assert sorted(path.name for path in final.iterdir()) == ["actor"]
    assert (final / "actor" / "tokenizer.json").is_file()


def actor(folder: Path, name: str) -> dict[str, bytes]:
    tensors = load_file(folder / "runs" / name / FINAL / "actor" / "model.safetensors")
    return {key: tensor.tobytes() for key, tensor in tensors.items()}


def test_a_run_that_is_interrupted_while_groups_are_deferred_goes_on_to_the_same_weights(folder: Path) -> None:
    settings = (*GROUPS, "step.algorithm=grpo", "run.steps=6", "run.panel=lines", "rewards.0.source=reward.py:late")
    assert oppo(folder, "", *settings, "run.name=whole") == DONE
    alike = "from tests.hf.child import set_up; set_up()"
    with start(folder, *settings, "run.name=stopped", before=alike, ENDED_AT="20") as process:
        _, said = process.communicate(timeout=120)
    assert process.returncode == 128 + signal.SIGTERM, said
    made = records(folder, "stopped", "metrics.jsonl")
    assert len(made) < 6
    assert made[-1]["deferral/deferred"]
    assert resume(folder, "stopped") == DONE
    assert len(records(folder, "stopped", "metrics.jsonl")) == 6
    assert actor(folder, "stopped") == actor(folder, "whole")
