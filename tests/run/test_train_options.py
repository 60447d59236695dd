"""``oppo train`` with everything about the trainer set away from its default at once."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from tokenizers import Tokenizer as Words, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from oppo.cli import main
from oppo.hf.lora import add_lora
from tests.hf import tiny

CONFIG = """
[run]
steps = 3
panel = "lines"
[models]
policy = "actor"
critic = "critic"
lora_rank = 4
[[rewards]]
source = "reward.py:score"
[data]
prompts = "prompts.jsonl"
[sampling]
max_new_tokens = 16
min_new_tokens = 3
temperature = 0.7
top_k = 40
stop_strings = ["w7", "w30 w"]
[step]
batch = 4
overcommit = 2
[algorithm]
kl_in = "loss"
kl_estimator = "k2"
value_clip = "none"
entropy_coefficient = 0.01
score_norm = true
score_clip = 2.0
reward_scale = 0.5
missing_eos_penalty = 1.0
whiten_rewards = true
[trainer]
learning_rate = 1e-2
critic_warmup = 1
epochs = 2
minibatches = 2
gradient_checkpointing = 2
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with all that the configuration names; its reward is not finite for one rollout in seven."""
    tiny.causal("llama", seed=1).save_pretrained(tmp_path / "actor")
    tiny.scalar("llama", seed=2).save_pretrained(tmp_path / "critic")
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2} | {f"w{k}": k for k in range(3, tiny.VOCABULARY)}
    words = Words(models.WordLevel(vocabulary, unk_token="<pad>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
    for name in ("actor", "critic"):
        tokenizer.save_pretrained(tmp_path / name)
    rows = [{"prompt": f"w{3 + k} w{4 + k}"} for k in range(30)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "reward.py").write_text(
        "def score(prompts, completions):\n    return [len(set(c.split())) / 10 for c in completions]\n"
    )
    (tmp_path / "config.toml").write_text(CONFIG)
    return tmp_path


@pytest.mark.adapters
def test_all_options_of_the_trainer_together_make_a_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["train", str(folder / "config.toml")])
    assert code == 0, capsys.readouterr().err
    run = folder / "runs" / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [record["train/grad_norm"] > 0 for record in records] == [False, True, True], "the critic's warm-up"
    for record in records:
        assert record["trained"] == 4
        assert record["objective/kl_coef"] == 0
        assert record["val/clipfrac_avg"] == 0
        assert math.isfinite(record["objective/shaped_scores"])
    assert records[0]["policy/kl_avg"] == pytest.approx(0, abs=1e-9), "a fresh adapter changes nothing"
    assert records[2]["policy/kl_avg"] > 0
    for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines():
        sample = json.loads(line)
        assert sample["tokens"] > 3 or sample["reason"] == "length"
        assert "w7" not in " ".join(sample["completion"].split()[3:-1])
    final = run / "checkpoints" / "final" / "actor"
    with safe_open(final / "adapter_model.safetensors", "pt") as adapters:
        assert all("lora_" in name for name in adapters.keys())  # noqa: SIM118 - it has keys, but cannot be iterated
    AutoModelForCausalLM.from_pretrained(final)


@pytest.mark.adapters
def test_an_adapter_is_trained_on_and_compared_with_itself(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = AutoModelForCausalLM.from_pretrained(folder / "actor")
    add_lora(base, 2, 4)
    begun = {name: each for name, each in base.named_parameters() if each.requires_grad}
    with torch.no_grad():
        for each in begun.values():
            each.add_(0.1 * torch.randn(each.shape, generator=torch.Generator().manual_seed(0)))
    base.save_pretrained(folder / "begun")
    chosen = ("models.lora_rank=0", "models.adapter=begun", "trainer.critic_warmup=0", "run.steps=2")
    overrides = [part for each in chosen for part in ("--set", each)]
    assert main(["train", str(folder / "config.toml"), *overrides]) == 0, capsys.readouterr().err
    run = folder / "runs" / "run"
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert records[0]["objective/kl"] == pytest.approx(0, abs=1e-5), "the reference is the policy as it begins"
    assert records[1]["objective/kl"] != pytest.approx(0, abs=1e-5)
    final = AutoModelForCausalLM.from_pretrained(run / "checkpoints" / "final" / "actor")
    learned = {name: each for name, each in final.named_parameters() if name in begun}
    assert learned.keys() == begun.keys()
    change = [float((learned[name] - each).detach().abs().max()) for name, each in begun.items()]
    assert 0 < max(change) < 0.15, "a new one would be further from it"
