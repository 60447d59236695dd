"""Vision-language models are policies of text: their language model is trained, and they are saved whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from oppo.hf.kv.reader import Incremental
from oppo.hf.loading import load_causal, load_scalar
from oppo.hf.lora import add_lora
from tests.hf import tiny
from tests.workplace import furnish, oppo, resume, tokenizer

WITHOUT = [name for name in tiny.VISION if name != "qwen3.5"]


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    folder = furnish(tmp_path_factory.mktemp("workplace"))
    for name in tiny.VISION:
        tiny.seeing(name, seed=1).save_pretrained(folder / name)
        tokenizer().save_pretrained(folder / name)
        (folder / name / "preprocessor_config.json").write_text('{"image_mean": [0.5]}')
    return folder


def of_images(name: str) -> bool:
    parts = {*name.split(".")}
    if parts & {"git", "output"}:  # of GIT, whose language model is no part of its own
        return "image_encoder" in parts
    return not parts & {"language_model", "lm_head", "embed_tokens", "score"}


@pytest.mark.parametrize("name", tiny.VISION)
def test_it_loads_whole_and_only_its_language_model_is_trained(name: str, workplace: Path) -> None:
    model = load_causal(workplace / name)
    frozen = {each for each, weight in model.named_parameters() if not weight.requires_grad}
    assert frozen
    assert frozen == {each for each, _ in model.named_parameters() if of_images(each)}


@pytest.mark.parametrize("name", tiny.VISION)
def test_it_reads_text_in_pieces_as_at_once(name: str, workplace: Path) -> None:
    model = load_causal(workplace / name)
    rows = {row: torch.arange(3, 40 + 9 * row) % tiny.VOCABULARY for row in range(3)}
    with torch.inference_mode():
        whole = {row: model(input_ids=tokens[None], use_cache=False).logits[0] for row, tokens in rows.items()}
        reader = Incremental(model)
        first = reader.extend(list(rows), [tokens[: 5 + 7 * row] for row, tokens in rows.items()])
        second = reader.extend(list(rows), [tokens[5 + 7 * row :] for row, tokens in rows.items()])
    for row, expected in whole.items():
        torch.testing.assert_close(torch.cat([first[row], second[row]]), expected, rtol=1e-4, atol=1e-4)


def test_a_critic_of_one_is_trained_in_its_language_model_and_its_head(tmp_path: Path) -> None:
    config = tiny.VISION["gemma3"]()
    config.num_labels = 1
    tiny.scalar_of(config).save_pretrained(tmp_path)
    critic = load_scalar(tmp_path)
    trained = {each for each, weight in critic.named_parameters() if weight.requires_grad}
    assert "score.weight" in trained
    assert trained == {each for each, _ in critic.named_parameters() if not of_images(each)}


@pytest.mark.adapters
@pytest.mark.parametrize("name", WITHOUT)
def test_adapters_are_those_of_the_language_model(name: str, workplace: Path) -> None:
    model = load_causal(workplace / name)
    add_lora(model, 2, 4)
    trained = [each for each, weight in model.named_parameters() if weight.requires_grad]
    assert trained
    assert all(".lora_" in each and not of_images(each) for each in trained)


@pytest.mark.parametrize("name", ["qwen3-vl", "gemma3"])
def test_a_run_trains_and_resumes_it_and_saves_the_whole_checkpoint(name: str, workplace: Path) -> None:
    chosen = (f"models.policy={name}", "rewards.0.source=reward.py:short", "step.algorithm=grpo", "algorithm.samples=2")
    options = (*chosen, "run.panel=off", "run.deterministic=true", "trainer.learning_rate=1e-2", "step.overcommit=0")
    assert oppo(workplace, "", f"run.name={name}", *options) == 0
    assert oppo(workplace, "", f"run.name={name}-1", "run.steps=1", *options) == 0
    assert resume(workplace, f"{name}-1", "run.steps=2") == 0
    before = load_file(workplace / name / "model.safetensors")
    after, resumed = (saved(workplace / "runs" / run) for run in (name, f"{name}-1"))
    assert before.keys() == after.keys() == resumed.keys()
    changed = {each for each, tensor in before.items() if not torch.equal(tensor, after[each])}
    assert changed
    assert not {each for each in changed if of_images(each)}
    assert all(torch.equal(tensor, resumed[each]) for each, tensor in after.items())
    final = workplace / "runs" / name / "checkpoints" / "final" / "actor"
    assert (final / "preprocessor_config.json").read_text() == '{"image_mean": [0.5]}'
    assert type(AutoModelForImageTextToText.from_pretrained(final)).__name__.endswith("ForConditionalGeneration")


def saved(run: Path) -> dict[str, Tensor]:
    return load_file(run / "checkpoints" / "final" / "actor" / "model.safetensors")
