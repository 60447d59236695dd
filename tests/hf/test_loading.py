"""Models come from safetensors, complete and probed, or with a message about what was looked for."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub.constants import ENDPOINT, HF_HUB_ETAG_TIMEOUT
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BertConfig,
    CTRLConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from oppo.errors import ConfigError, ModelRefused
from oppo.hf.kv.attention import attend_in_segments, attends_eagerly
from oppo.hf.loading import ModelRecipe, load_causal, load_scalar, load_tokenizer, name_of, positions_of, vocabulary_of
from oppo.hf.lora import add_lora
from oppo.hf.tokenizer import _copy_and_why
from oppo.hf.weights import ALIGNMENT, weights_digest
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


def test_directories_that_hold_another_model_or_none_are_refused_by_what_they_hold(
    causal: Path, scalar: Path, tmp_path: Path
) -> None:
    def refused(message: str, load: Callable[[Path], object], path: Path) -> None:
        with pytest.raises(ConfigError, match=message):
            load(path)

    tiny.scalar("llama", labels=2).save_pretrained(tmp_path / "two")
    refused(r"score\.weight is \[2, 32\], not \[1, 32\]", load_scalar, tmp_path / "two")
    refused(r"has no lm_head\.weight.*causal language model", load_causal, scalar)
    refused(r"float32, bfloat16, .*'int4'", partial(load_causal, dtype="int4"), causal)
    (empty := tmp_path / "empty").mkdir()
    (empty / "notes.txt").write_text("no model")
    refused(r"holds notes\.txt; looked for config\.json", load_causal, empty)
    shutil.copy(causal / "config.json", empty)
    torch.save(load_file(causal / "model.safetensors"), empty / "pytorch_model.bin")
    refused(r"holds its weights only as pickles \(pytorch_model\.bin\)", load_causal, empty)


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
    with pytest.raises(ConfigError, match=r"would run code of its own \(code_of_novel\.py\)"):
        load_causal(novel)
    assert not (tmp_path / "modules").exists()
    model = load_causal(novel, trust_remote_code=True)
    assert type(model).__name__ == "NovelForCausalLM"
    assert weights_digest(model) == weights_digest(tiny.causal("llama", seed=1))


def test_a_model_that_cannot_be_served_is_refused_at_load(tmp_path: Path) -> None:
    tiny.of(tiny.build(BertConfig, tiny.GROUPED, is_decoder=False)).save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=r"BertLMHeadModel.*not causal"):
        load_causal(tmp_path)


def test_a_model_that_reads_whole_responses_says_so_once_and_keeps_its_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tiny.of(tiny.ONLY_WHOLE["rwkv"]())
    saved.save_pretrained(tmp_path)
    model, ids = load_causal(tmp_path), torch.arange(3, 20)[None]
    said = "".join(capsys.readouterr())
    assert said.count("reads whole responses") == 1
    assert "takes no KV cache" in said
    with torch.no_grad():
        found, want = (each.train(mode=False)(ids, use_cache=False).logits for each in (model, saved))
    torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-3)
    assert weights_digest(model) == weights_digest(tiny.of(tiny.ONLY_WHOLE["rwkv"]())), "not scaled in place"


def test_an_architecture_without_a_model_of_the_kind_asked_for_is_refused_by_name(tmp_path: Path) -> None:
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=4)
    T5ForConditionalGeneration(config).save_pretrained(tmp_path / "t5")
    with pytest.raises(ModelRefused, match="type 't5', of which transformers has no causal language model"):
        load_causal(tmp_path / "t5")


def test_a_model_that_cannot_attend_in_segments_is_served_by_another_kind_and_that_is_reported(
    tmp_path: Path, messages: list[str]
) -> None:
    tiny.of(tiny.WHOLE["diffllama"]()).save_pretrained(tmp_path)
    assert not attend_in_segments(load_causal(tmp_path))
    assert messages == [
        f"{tmp_path} is served with attention 'padded': each row of a batch takes the memory and time of the longest"
    ]
    with pytest.raises(ModelRefused, match="with attention 'segmented'"):
        load_causal(tmp_path, attention="segmented")
    load_causal(tmp_path, attention="padded")
    assert len(messages) == 1, "a chosen kind is not reported"


def test_the_kind_of_attention_that_is_chosen_is_used(causal: Path, scalar: Path) -> None:
    model = load_causal(causal, attention="eager")
    assert attends_eagerly(model)
    assert model._supports_sdpa, "it could have been another"
    assert not attend_in_segments(load_scalar(scalar, attention="padded"))
    assert attend_in_segments(load_scalar(scalar, attention="segmented"))
    with pytest.raises(ConfigError, match=r"auto, segmented, padded, eager, not 'flash'"):
        load_causal(causal, attention="flash")  # type: ignore[arg-type]  # what a settings file may hold


def test_a_model_without_a_score_layer_is_refused_where_it_is_loaded(tmp_path: Path) -> None:
    config = tiny.build(CTRLConfig, vocab_size=96, n_positions=64, n_embd=32, dff=32, n_layer=2, n_head=4)
    tiny.scalar_of(config).save_pretrained(tmp_path)
    for new_head in (False, True):
        with pytest.raises(ModelRefused, match="CTRLForSequenceClassification has no score layer on its last hidden"):
            load_scalar(tmp_path, new_head=new_head)


def test_a_vocabulary_of_nothing_but_special_tokens_is_none(tmp_path: Path) -> None:
    tiny.causal("gpt2").save_pretrained(tmp_path)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 1, "which is what transformers makes of no file at all"
    with pytest.raises(ConfigError, match=r"no tokenizer could be loaded: the directory .* looked for tokenizer\.json"):
        load_tokenizer(tmp_path)


def rewrite(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    held = {name: tensor.clone() for name, tensor in load_file(directory / "model.safetensors").items()}
    save_file(held | tensors, directory / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture
def reward(tmp_path: Path) -> Path:
    """A reward model whose embedding could be the head of a causal one."""
    config = tiny.CONFIGS["llama"]()
    config.num_labels, config.tie_word_embeddings = 1, True
    tiny.scalar_of(config).save_pretrained(tmp_path / "reward")
    return tmp_path / "reward"


def test_weights_that_a_model_does_not_use_are_refused_and_left_out_where_that_is_asked_for(
    reward: Path, messages: list[str]
) -> None:
    with pytest.raises(ConfigError, match=r"has score\.weight, which LlamaForCausalLM does not use.*ignore_unused_w"):
        load_causal(reward)
    assert type(load_causal(reward, ignore_unused=True)).__name__ == "LlamaForCausalLM"
    assert messages == [f"{reward} has score.weight, left out since LlamaForCausalLM does not use that"]


def test_a_head_for_logits_is_left_out_of_a_model_that_gives_one_number(reward: Path, messages: list[str]) -> None:
    rewrite(reward, {"lm_head.weight": torch.zeros(tiny.VOCABULARY, tiny.HIDDEN)})
    load_scalar(reward)
    assert messages == [f"{reward} has lm_head.weight, left out since LlamaForSequenceClassification does not use that"]
    rewrite(reward, {"v_head.weight": torch.zeros(1, tiny.HIDDEN)})
    with pytest.raises(ConfigError, match=r"has v_head\.weight, which LlamaForSequenceClassification does not use"):
        load_scalar(reward)


@pytest.mark.parametrize(
    ("name", "constants"),
    [
        ("gpt2", ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias")),
        ("gptj", ("transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias")),
        ("gptj", ("transformer.h.0.attn.embed_positions",)),
        ("neox", ("gpt_neox.layers.0.attention.masked_bias", "gpt_neox.layers.0.attention.rotary_emb.inv_freq")),
        ("opt", ("model.decoder.version",)),
        ("llama", ("model.layers.0.self_attn.rotary_emb.inv_freq",)),
    ],
    ids=str,
)
def test_constants_that_checkpoints_once_held_are_no_weights(
    tmp_path: Path, name: str, constants: tuple[str, ...], messages: list[str]
) -> None:
    tiny.causal(name).save_pretrained(tmp_path)
    rewrite(tmp_path, {constant: torch.zeros(4) for constant in constants})
    assert weights_digest(load_causal(tmp_path)) == weights_digest(tiny.causal(name))
    assert not [message for message in messages if "left out" in message]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_weight_that_is_no_number_is_named(reward: Path, dtype: str) -> None:
    weight = load_file(reward / "model.safetensors")["model.norm.weight"]
    weight[7] = 1e30 if dtype == "float16" else torch.nan
    rewrite(reward, {"model.norm.weight": weight})
    with pytest.raises(ConfigError, match=rf"model\.norm\.weight of the .* NaN or infinite numbers in torch\.{dtype}"):
        load_scalar(reward, dtype=dtype)


def test_running_out_of_memory_is_no_damage(causal: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        torch.empty(1 << 50, dtype=torch.uint8)

    monkeypatch.setattr("oppo.hf.loading._align", full)
    with pytest.raises(RuntimeError, match="can't allocate memory"):
        load_causal(causal)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    base = tmp_path / "base"
    tiny.causal("llama", seed=1).save_pretrained(base)
    model = load_causal(base)
    add_lora(model, 4, 8)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * parameter.requires_grad)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


@pytest.mark.adapters
def test_the_recipe_of_an_adapter_has_the_configuration_of_its_base(adapter: Path) -> None:
    recipe = ModelRecipe(path=str(adapter))
    model = recipe.load()
    assert (name_of(recipe), positions_of(recipe), vocabulary_of(recipe)) == (
        name_of(model),
        positions_of(model),
        vocabulary_of(model),
    )


@pytest.mark.adapters
def test_an_adapter_and_its_base_are_data_and_whole(adapter: Path) -> None:
    with pytest.raises(ConfigError, match=r"adapter' has no score\.weight"):
        load_scalar(adapter)
    weights = load_file(adapter / "adapter_model.safetensors")
    torch.save(weights, adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").rename(adapter / "away")
    with pytest.raises(ConfigError, match=r"only as pickles \(adapter_model\.bin\)"):
        load_causal(adapter)
    assert weights_digest(load_causal(adapter, allow_pickle=True))
    weights.popitem()
    save_file(weights, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"adapter' has no .*lora_.*: it is incomplete"):
        load_causal(adapter)
    (adapter / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors is no safetensors file"):
        load_causal(adapter)
    (adapter / "away").rename(adapter / "adapter_model.safetensors")
    rewrite(adapter.parent / "base", {"model.fourth.weight": torch.zeros(2)})
    with pytest.raises(ConfigError, match=r"has model\.fourth\.weight, which LlamaForCausalLM does not use"):
        load_causal(adapter)
    shutil.copy(adapter.parent / "base" / "config.json", adapter)
    with pytest.raises(ConfigError, match="an adapter beside a model"):
        load_causal(adapter)


@pytest.fixture
def hub_copy(causal: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the hub's cache holds of ``owner/kept``: links to files whose names are digests."""
    repository = tmp_path / "models--owner--kept"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(causal.iterdir())):
        shutil.copy(file, repository / "blobs" / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    _copy_and_why.cache_clear()
    return snapshot


def test_what_this_machine_keeps_of_a_hub_is_read_through_its_links(hub_copy: Path, causal: Path) -> None:
    model = load_causal("owner/kept")
    assert weights_digest(model) == weights_digest(load_causal(causal))
    assert model.name_or_path == "owner/kept", "by which adapters name their base"
    (hub_copy / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"snapshots/a+' holds config\.json.*; looked for"):
        load_causal("owner/kept")


def test_a_hub_is_asked_once_and_that_is_told(
    hub_copy: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]
) -> None:
    asked: list[tuple[str, float]] = []

    def refuse(_: object, name: str, *, timeout: float) -> None:
        asked.append((name, timeout))
        raise TimeoutError("no answer")

    monkeypatch.setattr("oppo.hf.tokenizer.is_offline_mode", lambda: False)
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", refuse)
    with pytest.raises(ConfigError, match=r"^'owner/none' is no directory here, .* \(TimeoutError: no answer\)$"):
        load_causal("owner/none")
    assert asked == [("owner/none", HF_HUB_ETAG_TIMEOUT)]
    assert messages == [f"owner/none is no directory here: asking {ENDPOINT} for it"]
    for load in (load_causal, load_causal, partial(load_scalar, new_head=True)):
        load("owner/kept")
    assert asked[1:] == [("owner/kept", HF_HUB_ETAG_TIMEOUT)]
    assert messages[1] == f"owner/kept is no directory here: asking {ENDPOINT} for it"
    assert messages[2] == f"taking owner/kept as this machine's copy {hub_copy} has it (TimeoutError: no answer)"
    assert messages[3:] == ["owner/kept has no score.weight: the head is new, and begins at zero"]


def test_models_that_threads_load_at_once_are_made_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else transformers may leave every later model of the process without tied weights."""
    tiny.causal("gemma", seed=1).save_pretrained(tmp_path)
    ties, inside = PreTrainedModel.tie_weights, list[int]()
    from_pretrained: Callable[..., object] = AutoModelForCausalLM.from_pretrained

    def slow(*args: object, **options: object) -> object:
        inside.append(len(inside))
        time.sleep(0.05)
        made = from_pretrained(*args, **options)
        inside.pop()
        assert not inside, "another thread makes a model"
        return made

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", slow)
    with ThreadPoolExecutor(3) as threads:
        for model in threads.map(load_causal, [tmp_path] * 3):
            assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert PreTrainedModel.tie_weights is ties
