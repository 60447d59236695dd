from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    Qwen2Config,
)

from examples.reasoning_gym.make_model import make_tokenizer
from examples.rlhf import evaluate, run, samples
from examples.smollm2.reward import judge
from oppo.cli import main as command
from oppo.config.load import load_settings
from oppo.events import Finish, Prompt, Response
from oppo.hf import load_tokenizer

EXAMPLE = Path(run.__file__).parent
TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<end>{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
QUESTION = [{"role": "user", "content": "How does soap work?"}]


def answer(text: str, reason: str = "eos", *, admission: int = 0) -> tuple[float, Finish, str]:
    prompt = Prompt(0, admission, np.array([1], np.int32), columns={"prompt": QUESTION})
    finish = Finish(prompt.rollout, Response.empty(prompt), reason)  # type: ignore[arg-type]
    return judge(QUESTION, text).score, finish, text


GOOD, CUT = answer("Soap surrounds the grease. Glad to help!"), answer("Soap surrounds the gr", "length")


def test_the_better_answer_is_preferred_and_only_a_whole_one_is_a_demonstration() -> None:
    ranked = [GOOD, GOOD, CUT, CUT]
    assert [row["chosen"] for row in samples.pairs([ranked])] == [[samples.said(GOOD[2])]] * 2
    assert [row["rejected"] for row in samples.pairs([ranked])] == [[samples.said(CUT[2])]] * 2
    assert list(samples.pairs([[GOOD] * 4, [CUT] * 4])) == []
    (only,) = samples.demonstrations([ranked, [CUT] * 4])
    assert only == {"prompt": QUESTION, "completion": [samples.said(GOOD[2])]}


def test_wins_are_by_pairs_and_a_tie_is_half_of_one() -> None:
    scored = [evaluate.Answer("", "", rule, -rule, 1, ended=True) for rule in (0.0, 1.0, 2.0, 3.0)]
    higher = [evaluate.Answer("", "", rule, -rule, 1, ended=True) for rule in (1.0, 1.0, 3.0, 4.0)]
    assert evaluate.wins(scored, higher, "rule")[0] == 0.875
    assert evaluate.wins(scored, higher, "reward")[0] == 0.125
    assert evaluate.wins(scored, scored, "rule") == (0.5, 0.0)


def test_every_step_has_a_command_and_its_settings_are_valid(tmp_path: Path) -> None:
    steps = dict(run.commands(tmp_path / "base", tmp_path, short=True))
    assert list(steps) == ["sample", "sft", "reward", "ppo", "evaluate"]
    ppo = steps["ppo"]
    chosen = [ppo[place + 1] for place, part in enumerate(ppo) if part == "--set"]
    settings = load_settings(Path(ppo[2]), chosen)
    assert (settings.run.steps, settings.models.adapter) == (2, str(tmp_path / "sft"))
    assert settings.step.overcommit
    assert settings.sampling.max_new_tokens == samples.MAX_NEW_TOKENS


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without sense, some of whose responses end by themselves."""
    folder = tmp_path_factory.mktemp("rlhf") / "base"
    questions = (EXAMPLE.parent / "smollm2" / "prompts.jsonl").read_text(encoding="utf-8").splitlines()
    tokenizer = make_tokenizer([json.loads(line)["prompt"][0]["content"] for line in questions])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = LlamaForCausalLM(small(len(tokenizer)))
    model.lm_head.weight.data[1] *= 3
    model.save_pretrained(folder)
    return folder


def small(vocabulary: int, **settings: Any) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=vocabulary, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.2, pad_token_id=0, eos_token_id=1,
        bos_token_id=None, **settings,
    )  # fmt: skip


@pytest.mark.adapters
def test_the_settings_for_a_gpu_run_dry_here_and_fit_a_card_of_24_gb(base: Path, tmp_path: Path) -> None:
    from peft import LoraConfig

    policy = LlamaForCausalLM.from_pretrained(base)
    policy.add_adapter(LoraConfig(r=16, lora_alpha=32, target_modules="all-linear"))
    policy.save_pretrained(tmp_path / "sft")
    reward = LlamaForSequenceClassification(small(policy.config.vocab_size, num_labels=1))
    reward.save_pretrained(tmp_path / "reward")
    samples.write([{"prompt": QUESTION}] * 80, tmp_path / "prompts.jsonl")
    for name in ("reward", "seven"):
        load_tokenizer(base).save_pretrained(tmp_path / name)
    paths = {"models.adapter": "sft", "rewards.0.source": "reward", "data.prompts": "prompts.jsonl"}
    chosen = [f"{key}={json.dumps(str(tmp_path / name))}" for key, name in paths.items()]
    chosen += [f"models.policy={json.dumps(str(base))}", "run.steps=2"]
    file = str(EXAMPLE / "qlora.toml")
    assert command(["train", file, *(part for each in chosen for part in ("--set", each)), "--dry-run"]) == 0
    # Qwen2.5-7B's shape, with an adapter that is new: of a model without weights there is none.
    Qwen2Config(
        vocab_size=152064, hidden_size=3584, intermediate_size=18944, num_hidden_layers=28, num_attention_heads=28,
        num_key_value_heads=4, tie_word_embeddings=False, architectures=["Qwen2ForCausalLM"], dtype="bfloat16",
    ).save_pretrained(tmp_path / "seven")  # fmt: skip
    chosen[0], chosen[3] = 'models.adapter=""', f"models.policy={json.dumps(str(tmp_path / 'seven'))}"
    sets = [part for each in (*chosen, "models.lora_rank=16") for part in ("--set", each)]
    assert command(["doctor", file, *sets, "--assume", "1x24GB"]) == 0


def test_a_run_that_is_there_is_not_written_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs" / "ppo").mkdir(parents=True)
    assert run.main(["--folder", str(tmp_path)]) == 2
    assert "is there already: remove it, or choose another --folder" in capsys.readouterr().err


# The steps themselves, with TRL: a minute.


@pytest.fixture(scope="module")
def folder(base: Path) -> Path:
    folder = base.parent
    assert run.main(["--short", "--base", str(base), "--folder", str(folder)]) == 0
    return folder


@pytest.mark.gym
@pytest.mark.timeout(900)
def test_oppo_reads_what_trl_wrote_and_scores_as_it(folder: Path) -> None:
    from peft import PeftModel
    from trl.data_utils import maybe_apply_chat_template

    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    assert list(results["seconds"]) == ["sample", "sft", "reward", "ppo", "evaluate"]
    assert len(results["table"]) == 5
    tokenizer = load_tokenizer(folder / "sft")
    reward = AutoModelForSequenceClassification.from_pretrained(folder / "reward").eval()
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    trained: Any = PeftModel.from_pretrained(base, folder / "sft").eval()
    answered = results["answers"]["after fine-tuning"]
    assert len(answered) > 4
    for found in answered:
        asked = [samples.SYSTEM, {"role": "user", "content": found["question"]}]
        opened: Any = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_tensors="pt")
        with torch.inference_mode():
            greedy = trained.generate(**opened, max_new_tokens=40, do_sample=False)[0, opened["input_ids"].shape[1] :]
            assert tokenizer.decode(greedy, skip_special_tokens=True) == found["text"]
            assert (len(greedy), bool(greedy[-1] == tokenizer.eos_token_id)) == (found["tokens"], found["ended"])
            whole = maybe_apply_chat_template({"messages": [*asked, samples.said(found["text"])]}, tokenizer)["text"]
            score = reward(**tokenizer(whole, return_tensors="pt")).logits.item()
        assert found["reward"] == pytest.approx(score, abs=1e-4)


@pytest.mark.gym
@pytest.mark.timeout(900)
def test_training_begins_at_the_adapter_and_changes_it(folder: Path) -> None:
    steps = [json.loads(line) for line in (folder / "runs" / "ppo" / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2
    assert steps[0]["objective/kl"] == pytest.approx(0, abs=1e-4)
    before, after = (json.loads((each / "adapter_config.json").read_text()) for each in (
        folder / "sft", folder / "runs" / "ppo" / "checkpoints" / "final" / "actor",
    ))  # fmt: skip
    assert (before["r"], before["lora_alpha"]) == (after["r"], after["lora_alpha"]) == (16, 32)
