"""``oppo train`` with models that are not four modules in float32: one trunk for two of them, and 16-bit weights."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from oppo.config.load import load
from tests.hf import tiny
from tests.workplace import furnish, oppo, records, tokenizer


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return furnish(tmp_path_factory.mktemp("workplace"))


def metrics(workplace: Path, name: str) -> list[dict[str, object]]:
    """Return a run's metrics; all of them are finite."""
    lines = records(workplace, name, "metrics.jsonl")
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert [line["trained"] for line in lines] == [4, 4]
    return lines


@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=pytest.mark.adapters)], ids=["weights", "adapters"])
def test_actor_and_critic_train_on_one_trunk(workplace: Path, lora: int) -> None:
    name = f"trunk-{lora}"
    overrides = ("models.shared_trunk=true", f"models.lora_rank={lora}", "trainer.critic_warmup=1", "run.panel=off")
    assert oppo(workplace, "", f"run.name={name}", *overrides) == 0
    warming, learning = metrics(workplace, name)
    assert warming["train/grad_norm"] == 0
    assert isinstance(learning["train/grad_norm"], float)
    assert learning["train/grad_norm"] > 0
    run = workplace / "runs" / name
    again = load(run / "config.toml")
    assert again.models.shared_trunk
    assert again.models.critic == "", "the resolved file means the same"
    final = run / "checkpoints" / "final"
    actor = AutoModelForCausalLM.from_pretrained(final / "actor")
    critic = AutoModelForSequenceClassification.from_pretrained(final / "critic")
    ids = torch.arange(3, 23).reshape(2, 10)
    with torch.no_grad():
        theirs = [model.base_model(ids, use_cache=False).last_hidden_state for model in (actor, critic)]
    torch.testing.assert_close(*theirs, rtol=1e-5, atol=1e-5)
    assert critic.get_parameter("score.weight").any(), "the head began with zeros"


def test_bfloat16_models_are_served_and_trained(workplace: Path) -> None:
    overrides = ("models.dtype=bfloat16", "models.shared_trunk=true", "run.panel=off", "trainer.learning_rate=1e-2")
    assert oppo(workplace, "", "run.name=half", *overrides) == 0
    metrics(workplace, "half")
    written = load_file(workplace / "runs" / "half" / "checkpoints" / "final" / "actor" / "model.safetensors")
    before = load_file(workplace / "actor" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert any(not torch.equal(tensor, before[name].bfloat16()) for name, tensor in written.items())


def test_a_policy_that_cannot_attend_in_parts_is_trained_and_what_serving_it_costs_is_said(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.of(tiny.WHOLE["diffllama"]()).save_pretrained(workplace / "whole")
    tokenizer().save_pretrained(workplace / "whole")
    overrides = (f"models.policy={workplace / 'whole'}", "rewards.0.source=reward.py:short", "models.critic=reward")
    assert oppo(workplace, "", "run.name=whole", "run.panel=lines", *overrides) == 0
    metrics(workplace, "whole")
    assert f"{workplace / 'whole'} is served with attention 'padded': each row" in capsys.readouterr().err
    assert oppo(workplace, "", "run.name=refused", "models.attention=segmented", *overrides) == 2
    refusal = capsys.readouterr().err
    assert "models.policy: DiffLlamaForCausalLM" in refusal
    assert "with attention 'segmented': " in refusal


def test_models_that_read_whole_responses_score_and_train_but_do_not_decode(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.of(tiny.ONLY_WHOLE["jamba"](), seed=4).save_pretrained(workplace / "jamba")
    config = tiny.ONLY_WHOLE["minimax"]()
    config.num_labels = 1
    tiny.scalar_of(config, seed=5).save_pretrained(workplace / "minimax")
    for name in ("jamba", "minimax"):
        tokenizer().save_pretrained(workplace / name)
    models = ("models.reference=jamba", 'rewards=[{source="minimax"}]', "models.critic=minimax", "run.panel=off")
    assert oppo(workplace, "", "run.name=scored", *models) == 0
    metrics(workplace, "scored")
    log = "".join(capsys.readouterr())
    assert "jamba reads whole responses" in log
    assert oppo(workplace, "", "run.name=undecoded", "models.policy=jamba", "run.panel=off") == 2
    refused = " ".join("".join(capsys.readouterr()).split())
    assert "models.policy: JambaForCausalLM" in refused
    assert "models.engine = 'vllm'" in refused
