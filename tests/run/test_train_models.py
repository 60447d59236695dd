"""``oppo train`` with models that are not four modules in float32: one trunk for two of them, and 16-bit weights."""

from __future__ import annotations

import json
import math
from pathlib import Path
from random import Random
from statistics import mean

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from oppo.config.load import load
from oppo.demo import language
from oppo.demo.assets import alone
from oppo.demo.models import TrainingBudget, train_policy, train_tokenizer
from oppo.hf.loading import load_scalar
from tests.hf import tiny
from tests.kit.workplace import furnish, oppo, records, resume, tokenizer


def metrics(folder: Path, name: str) -> list[dict[str, object]]:
    """Return a run's metrics; all of them are finite."""
    lines = records(folder, name, "metrics.jsonl")
    assert all(math.isfinite(value) for line in lines for value in line.values() if isinstance(value, float))
    assert [line["trained"] for line in lines] == [4, 4]
    return lines


@pytest.mark.parametrize("lora", [0, pytest.param(4, marks=pytest.mark.adapters)], ids=["weights", "adapters"])
def test_actor_and_critic_train_on_one_trunk(folder: Path, lora: int) -> None:
    name = f"trunk-{lora}"
    overrides = ("models.shared_trunk=true", f"models.lora_rank={lora}", "trainer.critic_warmup=1", "run.panel=off")
    assert oppo(folder, "", f"run.name={name}", *overrides) == 0
    warming, learning = metrics(folder, name)
    assert warming["train/grad_norm"] == 0
    assert isinstance(learning["train/grad_norm"], float)
    assert learning["train/grad_norm"] > 0
    run = folder / "runs" / name
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


def test_bfloat16_models_are_served_and_trained(folder: Path) -> None:
    overrides = ("models.dtype=bfloat16", "models.shared_trunk=true", "run.panel=off", "trainer.learning_rate=1e-2")
    assert oppo(folder, "", "run.name=half", *overrides) == 0
    metrics(folder, "half")
    written = load_file(folder / "runs" / "half" / "checkpoints" / "final" / "actor" / "model.safetensors")
    before = load_file(folder / "actor" / "model.safetensors")
    assert {tensor.dtype for tensor in written.values()} == {torch.bfloat16}
    assert any(not torch.equal(tensor, before[name].bfloat16()) for name, tensor in written.items())


def test_a_policy_that_cannot_attend_in_parts_is_trained_and_what_serving_it_costs_is_said(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.of(tiny.WHOLE["diffllama"]()).save_pretrained(folder / "whole")
    tokenizer().save_pretrained(folder / "whole")
    overrides = (f"models.policy={folder / 'whole'}", "rewards.0.source=reward.py:short", "models.critic=reward")
    assert oppo(folder, "", "run.name=whole", "run.panel=lines", *overrides) == 0
    metrics(folder, "whole")
    assert f"{folder / 'whole'} is served with attention 'padded': each row" in capsys.readouterr().err
    assert oppo(folder, "", "run.name=refused", "models.attention=segmented", *overrides) == 2
    refusal = capsys.readouterr().err
    assert "models.policy: DiffLlamaForCausalLM" in refusal
    assert "with attention 'segmented': " in refusal


def test_a_policy_of_which_transformers_has_no_classifier_begins_a_critic_which_a_resumed_run_goes_on_with(
    folder: Path,
) -> None:
    tiny.of(tiny.STATEFUL["lfm2"](), seed=4).save_pretrained(folder / "lfm2")
    tokenizer().save_pretrained(folder / "lfm2")
    models = ("models.policy=lfm2", "models.critic=lfm2", "run.panel=off", "run.checkpoint_every=1")
    assert oppo(folder, "", "run.name=headed", *models, "run.steps=1") == 0
    assert resume(folder, "headed", "run.steps=2") == 0
    metrics(folder, "headed")
    critic = folder / "runs" / "headed" / "checkpoints" / "final" / "critic"
    assert load_scalar(critic).get_parameter("score.weight").any(), "the head began with zeros"
    scored = (f'rewards=[{{source="{critic}"}}]', "models.shared_trunk=true", "run.name=scored-by-it")
    assert oppo(folder, "", *models[::2], *scored) == 0


def test_models_that_read_whole_responses_score_and_train_but_do_not_decode(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.of(tiny.ONLY_WHOLE["jamba"](), seed=4).save_pretrained(folder / "jamba")
    config = tiny.ONLY_WHOLE["minimax"]()
    config.num_labels = 1
    tiny.scalar_of(config, seed=5).save_pretrained(folder / "minimax")
    for name in ("jamba", "minimax"):
        tokenizer().save_pretrained(folder / name)
    models = ("models.reference=jamba", 'rewards=[{source="minimax"}]', "models.critic=minimax", "run.panel=off")
    assert oppo(folder, "", "run.name=scored", *models) == 0
    metrics(folder, "scored")
    log = "".join(capsys.readouterr())
    assert "jamba reads whole responses" in log
    assert oppo(folder, "", "run.name=undecoded", "models.policy=jamba", "run.panel=off") == 2
    refused = " ".join("".join(capsys.readouterr()).split())
    assert "models.policy: JambaForCausalLM" in refused
    assert "models.engine = 'vllm'" in refused


READERS = """
from oppo.demo.language import clauses, read

def warm(prompts, completions):
    known = [[meaning for clause in clauses(words) if (meaning := read(clause))] for words in completions]
    return [sum(each.sentiment for each in said) / (len(said) + 1) for said in known]
"""
RUN = (
    "models.shared_trunk=true",
    "rewards.0.source=readers.py:warm",
    "sampling.max_new_tokens=32",
    "step.batch=24",
    "step.overcommit=4",
    "step.chunk=8",
    "algorithm.kl=0.02",
    "trainer.learning_rate=4e-4",
    "trainer.epochs=2",
    "trainer.minibatches=2",
    "run.panel=off",
    "run.steps=20",
)


@pytest.mark.deep
def test_a_policy_with_states_that_has_learned_a_language_learns_what_its_readers_like(tmp_path: Path) -> None:
    dice, asks = Random(0), language.training_prompts(500, 0)
    corpus = [ask.text + language.review(ask.topic, dice) for ask in asks]
    words = train_tokenizer(corpus, vocabulary=512, longest=512)
    config = tiny.STATEFUL["qwen3.5"]()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "initializer_range": 0.02}
    linear = {"linear_num_key_heads": 4, "linear_key_head_dim": 32, "linear_value_head_dim": 32}
    special = {"pad_token_id": words.pad_token_id, "bos_token_id": words.bos_token_id}
    config.update(
        {"vocab_size": len(words), "eos_token_id": words.eos_token_id, "tie_word_embeddings": True}
        | (sizes | linear | special)
    )
    with alone(0):
        model = tiny.of(config)
        budget = TrainingBudget(steps=80, rows=2, learning_rate=8e-3)
        assert train_policy(words, model, budget, seed=0, progress=lambda *_: None) < 1.6
    folder = furnish(tmp_path)
    model.save_pretrained(folder / "actor")
    words.save_pretrained(folder / "actor")
    (folder / "readers.py").write_text(READERS)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": ask.text}) + "\n" for ask in asks))
    assert oppo(folder, "", *RUN, "run.name=warm") == 0
    lines = records(folder, "warm", "metrics.jsonl")
    scores = [line["score"] for line in lines]
    assert mean(scores[-5:]) > mean(scores[:5]) + 0.15, scores
    assert mean([line["overlap/hidden_fraction"] for line in lines]) > 0.3, "reference and critic read meanwhile"
