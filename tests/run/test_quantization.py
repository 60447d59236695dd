"""A run trains adapters over a base of 4 bits, wherever its models live."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oppo.cli import DONE
from tests.kit.workplace import oppo, records, resume
from tests.run.test_doctor import resting

pytestmark = pytest.mark.adapters

FOUR_BITS = ("models.lora_rank=4", "models.quantization=nf4", "trainer.epochs=1", "run.panel=off", "run.steps=3")


@pytest.mark.parametrize(
    "chosen",
    [
        ("trainer.gradient_checkpointing=1",),
        ("run.trainer=process", "run.scorers=process"),
        ('placement.trainer=["cpu", "cpu"]',),
    ],
    ids=["threads", "processes", "ranks"],
)
def test_adapters_over_a_quantised_base_are_trained(
    folder: Path, chosen: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    name = request.node.callspec.id
    assert oppo(folder, "", *FOUR_BITS, *chosen, f"run.name={name}") == DONE
    first, *_, last = records(folder, name, "metrics.jsonl")
    assert first["objective/kl"] == pytest.approx(0, abs=1e-5), "the reference is quantised too"
    assert abs(last["objective/kl"]) > 1e-5


def test_a_resumed_run_and_one_from_its_adapter_go_on_where_it_was(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def learned(name: str) -> dict[str, torch.Tensor]:
        return load_file(folder / "runs" / name / "checkpoints" / "final" / "actor" / "adapter_model.safetensors")

    chosen = (*FOUR_BITS, "run.deterministic=true", "run.checkpoint_every=1", "rewards.0.source=reward.py:late")
    assert oppo(folder, "", *chosen, "run.name=whole") == DONE
    with monkeypatch.context() as patched:
        patched.setenv("ENDED_AT", "6")
        assert oppo(folder, "", *chosen, "run.name=cut") != DONE
    assert resume(folder, "cut") == DONE
    whole, resumed = learned("whole"), learned("cut")
    assert all(torch.equal(whole[name], resumed[name]) for name in whole | resumed)
    adapter = "models.adapter=runs/whole/checkpoints/final/actor"
    assert oppo(folder, "", *FOUR_BITS[1:], adapter, "run.steps=1", "run.name=on") == DONE
    assert records(folder, "on", "metrics.jsonl")[0]["objective/kl"] == pytest.approx(0, abs=1e-5)


def test_the_doctor_counts_its_bytes(folder: Path) -> None:
    plain, smaller = resting(folder, FOUR_BITS[0]), resting(folder, *FOUR_BITS[:2])
    assert smaller["policy"].weights < 0.7 * plain["policy"].weights
    assert smaller["critic"].weights == plain["critic"].weights
