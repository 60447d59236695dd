"""Every algorithm in ``oppo train`` on real models: what is overlapped changes no bit, and each of them learns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, Final

import pytest
import torch
from safetensors.numpy import load_file

from oppo.algorithms.registry import ALGORITHMS
from oppo.app.train import FINAL
from oppo.cli import DONE, UNUSABLE
from tests.workplace import furnish, oppo, records

OWN: Final[Mapping[str, Sequence[str]]] = {
    "dapo": ["algorithm.samples=3", "algorithm.long_buffer=4", "algorithm.max_rounds=50"],
    "gspo": ["algorithm.samples=3"],
    "grpo": ["algorithm.samples=3"],
    "rloo": ["algorithm.samples=3"],
    "dr_grpo": ["algorithm.samples=3"],
}
"""The settings of an algorithm that are not at their defaults here."""

COMMON = ("run.panel=off", "models.reward=reward.py:short", "step.batch=3", "run.scorers=thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("algorithms"))


def trained(folder: Path, name: str, algorithm: str, *further: str) -> Sequence[Mapping[str, Any]]:
    """Run an algorithm; return the metrics of its steps."""
    chosen = (*COMMON, f"step.algorithm={algorithm}", *OWN.get(algorithm, ()), f"run.name={name}", *further)
    assert oppo(folder, "", *chosen) == DONE
    return records(folder, name, "metrics.jsonl")


def actor(folder: Path, name: str) -> Mapping[str, bytes]:
    tensors = load_file(folder / "runs" / name / FINAL / "actor" / "model.safetensors")
    return {key: tensor.tobytes() for key, tensor in tensors.items()}


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_streaming_changes_no_bit(folder: Path, algorithm: str) -> None:
    exact = ("run.exact=true", "step.extra=0", "run.steps=3")
    streamed = trained(folder, f"{algorithm}-streamed", algorithm, *exact, "step.chunk=3")
    whole = trained(folder, f"{algorithm}-whole", algorithm, *exact, "step.chunk=whole")
    weights = actor(folder, f"{algorithm}-streamed")
    assert weights == actor(folder, f"{algorithm}-whole")
    assert weights != {key: tensor.tobytes() for key, tensor in load_file(folder / "actor/model.safetensors").items()}
    assert [step["objective/scores"] for step in streamed] == [step["objective/scores"] for step in whole]
    assert all("loss/policy_avg" in step for step in streamed)


@pytest.mark.deep
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_it_learns_to_be_short_with_responses_carried_over(folder: Path, algorithm: str) -> None:
    rate = "trainer.learning_rate=3e-3"
    steps = trained(folder, f"{algorithm}-learns", algorithm, "step.batch=8", "step.extra=2", "run.steps=25", rate)
    scores = [step["objective/scores"] for step in steps]
    assert mean(scores[-5:]) > mean(scores[:5]) + 0.1, scores
    assert any(step["deferral/carried"] for step in steps)


def test_dapo_replaces_groups_and_punishes_long_responses(folder: Path) -> None:
    steps = trained(folder, "dapo", "dapo", "run.steps=3", "algorithm.long_buffer=12", "algorithm.long_penalty=5")
    assert all(step["selection/rounds"] >= 1 for step in steps)
    assert all(step["objective/frac_zero_std"] == 0 for step in steps), "groups without a difference are replaced"
    assert all(step["objective/shaped_scores"] < step["objective/scores"] for step in steps)
    plain = trained(folder, "undynamic", "dapo", "run.steps=1", "algorithm.dynamic_sampling=false")
    assert "selection/rounds" not in plain[0]


def test_a_penalty_on_more_than_a_whole_response_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chosen = ("step.algorithm=dapo", "algorithm.long_buffer=13", "run.name=too-long")
    assert oppo(folder, "", *COMMON, *chosen) == UNUSABLE
    assert "algorithm.long_buffer = 13 is more than sampling.max_new_tokens = 12" in capsys.readouterr().err
