"""Models come from safetensors, complete and probed, or with a sentence about what was looked for."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
)

from oppo.errors import ConfigError, ModelRefused
from oppo.hf.digest import weights_digest
from oppo.hf.load import ALIGNMENT, load_causal, load_scalar, load_tokenizer
from tests.hf import tiny


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("causal")
    tiny.causal("gpt2").save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def scalar(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scalar")
    tiny.scalar("llama").save_pretrained(path)
    return path


def test_a_causal_model_is_loaded_without_dropout_in_the_dtype_asked_for(causal: Path) -> None:
    model = load_causal(causal, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert not any(module.training for module in model.modules())
    assert load_causal(str(causal)).dtype == torch.float32


def test_weights_lie_where_torch_would_put_them(causal: Path, scalar: Path) -> None:
    models = AutoModelForCausalLM.from_pretrained(causal), load_causal(causal), load_scalar(scalar)
    mapped, *loaded = ({p.data_ptr() % ALIGNMENT for p in model.parameters()} for model in models)
    assert mapped != {0}, "without our doing they lie where the file's header ends"
    assert loaded == [{0}, {0}]
    assert weights_digest(models[0]) == weights_digest(models[1])
    tied = models[1].get_input_embeddings(), models[1].get_output_embeddings()
    assert tied[0].weight is tied[1].weight


def test_a_reward_model_keeps_its_head(scalar: Path) -> None:
    model = load_scalar(scalar)
    assert torch.equal(model.state_dict()["score.weight"], load_file(scalar / "model.safetensors")["score.weight"])


def test_a_causal_model_becomes_a_critic_only_when_a_new_head_is_asked_for(causal: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no score\.weight.*untrained head"):
        load_scalar(causal)
    critic = load_scalar(causal, new_head=True)
    assert critic.config.num_labels == 1
    assert not critic.state_dict()["score.weight"].any()
    assert torch.equal(
        critic.state_dict()["transformer.wte.weight"], load_causal(causal).state_dict()["transformer.wte.weight"]
    )


def test_a_classifier_with_two_labels_is_no_reward_model(tmp_path: Path) -> None:
    tiny.scalar("llama", labels=2).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"score\.weight is \[2, 32\], not \[1, 32\]"):
        load_scalar(tmp_path)


def test_a_reward_model_is_no_policy(scalar: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no lm_head\.weight.*causal language model"):
        load_causal(scalar)


def test_a_path_that_is_not_there_is_a_sentence(tmp_path: Path) -> None:
    for load in (load_causal, load_scalar, load_tokenizer):
        with pytest.raises(ConfigError, match=r"loaded: '.*nowhere' is no directory here"):
            load(tmp_path / "nowhere")


def test_a_directory_without_a_model_says_what_it_holds(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("no model")
    with pytest.raises(ConfigError, match=r"holds notes\.txt; looked for config\.json"):
        load_causal(tmp_path)


def test_pickled_weights_are_not_read(causal: Path, tmp_path: Path) -> None:
    shutil.copy(causal / "config.json", tmp_path)
    torch.save(load_file(causal / "model.safetensors"), tmp_path / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"pytorch_model\.bin; looked for config\.json and \*\.safetensors"):
        load_causal(tmp_path)


def test_tensors_are_read_from_pickles_where_that_is_asked_for(causal: Path, tmp_path: Path) -> None:
    shutil.copy(causal / "config.json", tmp_path)
    torch.save(load_file(causal / "model.safetensors"), tmp_path / "pytorch_model.bin")
    assert weights_digest(load_causal(tmp_path, allow_pickle=True)) == weights_digest(load_causal(causal))
    (tmp_path / "pytorch_model.bin").write_bytes(b"no pickle")
    with pytest.raises(ConfigError, match="damaged, or hold more than tensors"):
        load_causal(tmp_path, allow_pickle=True)


NOVEL = """
from transformers import LlamaConfig, LlamaForCausalLM

class NovelConfig(LlamaConfig):
    model_type = "novel"

class NovelForCausalLM(LlamaForCausalLM):
    config_class = NovelConfig
"""


def test_code_that_comes_with_a_model_runs_only_where_it_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr(sys, "path", [*sys.path])
    novel = tmp_path / "novel"
    tiny.causal("llama", seed=1).save_pretrained(novel)
    config = json.loads((novel / "config.json").read_text())
    code = {"AutoConfig": "code_of_novel.NovelConfig", "AutoModelForCausalLM": "code_of_novel.NovelForCausalLM"}
    (novel / "config.json").write_text(json.dumps(config | {"model_type": "novel", "auto_map": code}))
    (novel / "code_of_novel.py").write_text(NOVEL)
    with pytest.raises(ConfigError, match="no model could be loaded"):
        load_causal(novel)
    assert not (tmp_path / "modules").exists()
    model = load_causal(novel, trust_remote_code=True)
    assert type(model).__name__ == "NovelForCausalLM"
    assert weights_digest(model) == weights_digest(tiny.causal("llama", seed=1))


def test_a_model_that_cannot_be_served_is_refused_at_load(tmp_path: Path) -> None:
    BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match="Bloom"):
        load_causal(tmp_path)


def test_an_architecture_without_a_model_of_the_kind_asked_for_is_refused_by_name(tmp_path: Path) -> None:
    tiny.causal("cohere").save_pretrained(tmp_path / "cohere")
    with pytest.raises(ModelRefused, match=r"type 'cohere', of which transformers has no sequence classification"):
        load_scalar(tmp_path / "cohere", new_head=True)
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelRefused, match="type 't5', of which transformers has no causal language model"):
        load_causal(tmp_path / "t5")


def test_an_unknown_dtype_is_refused_by_name(causal: Path) -> None:
    with pytest.raises(ConfigError, match=r"float32, bfloat16, .*'int4'"):
        load_causal(causal, dtype="int4")


def test_a_tokenizer_is_loaded(tmp_path: Path) -> None:
    words = Tokenizer(WordLevel({"good": 0, "bad": 1, "?": 2}, unk_token="?"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?").save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).convert_tokens_to_ids(["bad", "good"]) == [1, 0]
