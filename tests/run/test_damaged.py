"""Whatever is damaged, foreign or lying in what a run loads is a message with its name: no traceback, and no hang."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from oppo.cli import main
from tests.kit.workplace import oppo

WEIGHTS, INDEX, CONFIG = "model.safetensors", "model.safetensors.index.json", "config.json"
UP = "model.layers.0.mlp.up_proj.weight"
DEEP = "[" * 100_000 + "]" * 100_000
DIGITS = "1" * 5_000

Damage: TypeAlias = Callable[[Path], object]


def refused(code: int, capsys: pytest.CaptureFixture[str], *messages: str) -> None:
    """Check that a command ended with these words, and as it does where something cannot be used."""
    said = capsys.readouterr().err
    assert code == 2, said
    assert "Traceback" not in said
    for message in messages:
        assert message in said


def says(file: str, text: str | bytes) -> Damage:
    """Let a file say something else."""
    return lambda model: (model / file).write_bytes(text if isinstance(text, bytes) else text.encode())


def sets(**changes: object) -> Damage:
    """Let ``config.json`` set something else."""

    def damage(model: Path) -> None:
        described = json.loads((model / CONFIG).read_text()) | changes
        (model / CONFIG).write_text(json.dumps({key: value for key, value in described.items() if value is not ...}))

    return damage


def holds(change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Damage:
    """Let the weights be others."""

    def damage(model: Path) -> None:
        weights = {name: tensor.clone() for name, tensor in load_file(model / WEIGHTS).items()}
        save_file(change(weights), model / WEIGHTS, metadata={"format": "pt"})

    return damage


def put(number: float) -> Damage:
    """Let one weight be this number."""

    def change(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        weights[UP][3, 5] = number
        return weights

    return holds(change)


def keeps(part: slice) -> Damage:
    """Let a part of the file of weights be all that there is."""
    return lambda model: (model / WEIGHTS).write_bytes((model / WEIGHTS).read_bytes()[part])


def indexes(entry: object, **others: object) -> Damage:
    """Let an index say that all weights are in ``entry``; they are in ``a.safetensors`` and ``a.bin``, and outside."""

    def damage(model: Path) -> None:
        weights = load_file(model / WEIGHTS)
        (model / WEIGHTS).rename(model / "a.safetensors")
        torch.save(weights, model / "a.bin")
        shutil.copy(model / "a.safetensors", model.parent / "outside.safetensors")
        index = {"metadata": {}, "weight_map": dict.fromkeys(weights, entry)} | others
        (model / INDEX).write_text(json.dumps(index))

    return damage


def becomes_a_pipe(file: str) -> Damage:
    """Let a file be a pipe, from which nothing ever comes."""

    def damage(model: Path) -> None:
        (model / file).unlink()
        os.mkfifo(model / file)

    return damage


def lacks(*files: str) -> Damage:
    """Let files be gone."""

    def damage(model: Path) -> None:
        for file in files:
            (model / file).unlink()

    return damage


NOT_WHOLE = f"{WEIGHTS} is no safetensors file, or not the whole of one"
NO_MODEL = "no model can be made of {model}/config.json and the weights beside it ("
NO_CONFIG = "{model}/config.json cannot be used ("
NO_TOKENIZER = "no tokenizer could be loaded: the directory '{model}' holds "

MODELS: dict[str, tuple[Damage, str]] = {
    "weights, empty": (says(WEIGHTS, ""), NOT_WHOLE),
    "weights, garbage": (says(WEIGHTS, b"garbage" * 99), NOT_WHOLE),
    "weights, cut short": (keeps(slice(0, -100)), NOT_WHOLE),
    "weights, cut short in their head": (keeps(slice(0, 100)), NOT_WHOLE),
    "weights, with a head of an exbibyte": (says(WEIGHTS, struct.pack("<Q", 2**60) + b"{}"), NOT_WHOLE),
    "weights, still in git-lfs": (says(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), "`git lfs pull`"),
    "weights, a pipe": (becomes_a_pipe(WEIGHTS), "looked for config.json and *.safetensors"),
    "weights, none": (holds(lambda _: {}), "has no model.embed_tokens.weight, "),
    "one weight missing": (
        holds(lambda weights: {name: tensor for name, tensor in weights.items() if name != UP}),
        f"has no {UP}: it is incomplete",
    ),
    "one weight too many": (
        holds(lambda weights: weights | {"model.fourth.weight": torch.zeros(2, 2)}),
        "has model.fourth.weight, which LlamaForCausalLM does not use",
    ),
    "one weight of another shape": (
        holds(lambda weights: weights | {UP: torch.zeros(2, 2)}),
        f"does not fit LlamaForCausalLM: {UP} is [2, 2], not [48, 32]",
    ),
    "NaN": (put(float("nan")), f"{UP} of the checkpoint at '{{model}}' holds NaN or infinite numbers"),
    "infinite": (put(float("-inf")), f"{UP} of the checkpoint at '{{model}}' holds NaN or infinite numbers"),
    "config, garbage": (says(CONFIG, "garbage"), "{model}/config.json is not valid JSON: "),
    "config, a list": (says(CONFIG, "[1]"), "{model}/config.json: expected a JSON object, got list"),
    "config, not UTF-8": (says(CONFIG, b"\xff\xfe"), "{model}/config.json is not valid JSON: 'utf-8' codec"),
    "config, deep": (says(CONFIG, DEEP), "{model}/config.json is not valid JSON: maximum recursion depth"),
    "config, a long number": (says(CONFIG, f'{{"hidden_size": {DIGITS}}}'), "config.json is not valid JSON: Exceeds"),
    "config, none": (lacks(CONFIG), "looked for config.json and *.safetensors"),
    "size, text": (sets(hidden_size="32"), NO_CONFIG),
    "size, a list": (sets(hidden_size=[32]), NO_CONFIG),
    "size, negative": (sets(hidden_size=-32), NO_MODEL + "RuntimeError: Trying to create tensor with negative dim"),
    "size, another": (sets(hidden_size=...), "does not fit LlamaForCausalLM: lm_head.weight is [96, 32], not [96, 40"),
    "size, enormous": (sets(hidden_size=10**9), "lm_head.weight is [96, 32], not [96, 1000000000]"),
    "vocabulary, enormous": (sets(vocab_size=10**12), "lm_head.weight is [96, 32], not [1000000000000, 32]"),
    "layers, a hundred thousand": (sets(num_hidden_layers=10**5), "describes 100000 layers, but there are 21 tensors"),
    "layers, one too many": (sets(num_hidden_layers=3), "has no model.layers.2.input_layernorm.weight, "),
    "layers, one too few": (
        sets(num_hidden_layers=1),
        "and 6 more, which LlamaForCausalLM does not use: expected the weights of the model that config.json describes",
    ),
    "heads, none": (sets(num_attention_heads=0), NO_CONFIG),
    "an unknown activation": (sets(hidden_act="nonsense"), NO_MODEL + "KeyError: 'nonsense')"),
    "an unknown rope": (sets(rope_parameters={"rope_type": "nonsense", "rope_theta": 1e4}), "KeyError: 'nonsense')"),
    "a rope of a negative factor": (
        sets(rope_parameters={"rope_type": "linear", "factor": -1, "rope_theta": 1e4}),
        "{model}/config.json: factor of the rotary embedding: expected more than 0, got -1 (int)",
    ),
    "a rope of one layer type without a base": (
        sets(rope_parameters={"full_attention": {"rope_type": "default", "rope_theta": 0}}),
        "{model}/config.json: rope_theta of the rotary embedding: expected more than 0, got 0 (int)",
    ),
    "an unknown architecture": (sets(model_type="nonsense"), NO_MODEL),
    "an architecture by number": (sets(model_type=3), NO_MODEL),
    "an unknown dtype": (sets(dtype="nonsense"), NO_CONFIG),
    "bitsandbytes": (sets(quantization_config={"quant_method": "bitsandbytes"}), "are quantised (bitsandbytes)"),
    "gptq": (sets(quantization_config={"quant_method": "gptq", "bits": 4}), "are quantised (gptq)"),
    "awq": (sets(quantization_config={"quant_method": "awq"}), "are quantised (awq)"),
    "tokenizer, an empty object": (says("tokenizer.json", "{}"), NO_TOKENIZER),
    "tokenizer, garbage": (says("tokenizer.json", "garbage"), "{model}/tokenizer.json is not valid JSON"),
    "tokenizer, none": (lacks("tokenizer.json", "tokenizer_config.json"), NO_TOKENIZER),
    "tokenizer, a pipe": (becomes_a_pipe("tokenizer.json"), NO_TOKENIZER),
    "tokenizer config, a list": (says("tokenizer_config.json", "[]"), "tokenizer_config.json: expected a JSON object"),
    "template, not UTF-8": (says("chat_template.jinja", b"\xff\xfe"), NO_TOKENIZER),
    "generation config, garbage": (says("generation_config.json", "garbage"), "generation_config.json is not valid"),
    "generation config, ends by text": (
        says("generation_config.json", '{"eos_token_id": ["</s>"]}'),
        "{model}/generation_config.json: expected token ids under eos_token_id, got ['</s>']",
    ),
    "index, a pickle": (indexes("a.bin"), "{model} holds its weights only as pickles (a.bin)"),
    "index, another directory": (indexes("../outside.safetensors"), "'../outside.safetensors', which is outside of"),
    "index, another root": (indexes("/etc/passwd"), "'/etc/passwd', which is outside of that directory"),
    "index, a file that is not there": (indexes("b.safetensors"), "{model}/b.safetensors is not there"),
    "index, numbers": (indexes(5), f"{{model}}/{INDEX}: expected a weight_map"),
    "index, no map": (indexes("", weight_map={}), f"{{model}}/{INDEX}: expected a weight_map"),
    "index, no metadata": (indexes("a.safetensors", metadata=None), f"{{model}}/{INDEX}: expected metadata"),
    "config, a pickle by name": (
        lambda model: [(model / "a.bin").write_bytes(b""), sets(transformers_weights="a.bin")(model)],
        "{model} holds its weights only as pickles (a.bin)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_is_not_what_it_says_is_refused_by_name(
    folder: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    damage, message = MODELS[name]
    model = folder / "models" / name
    shutil.copytree(folder / "actor", model)
    damage(model)
    code = oppo(folder, "--dry-run", f"models.policy={model}")
    refused(code, capsys, "error: models.policy: ", message.replace("{model}", str(model)))


def test_weights_in_shards_of_the_directory_are_read(folder: Path) -> None:
    model = folder / "sharded"
    shutil.copytree(folder / "actor", model)
    indexes("a.safetensors")(model)
    assert oppo(folder, "--dry-run", f"models.policy={model}") == 0


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (
            "models.policy=./actr",
            "(did you mean 'actor'?), nor could it be the name of a model at a hub",
        ),
        ("models.policy=models/of/mine", "'models/of/mine' is no directory here, nor could it be the name"),
        ("models.policy=https://hub.example/actor", "is no directory here, nor could it be the name of a model"),
        ("models.policy=actr", "'actr' is no directory here, and as a hub name it could not be had ("),
        ("models.policy=actr/model", "'actr/model' is no directory here, and as a hub name it could not be had ("),
        ("models.policy=of/mine", "'of/mine' is no directory here, and as a hub name it could not be had ("),
        ("models.policy=a\0b", r"'a\x00b' is no directory here, nor could it be"),
        ("models.policy=~nobody-of-that-name/x", "'~nobody-of-that-name/x' is no path that can be followed"),
        ("models.policy=loop", "loop"),
        ("models.policy=pipe.jsonl", "pipe.jsonl' is no directory here"),
        ("rewards.0.source=a\0b.py:f", r"'a\x00b.py' is no path that can be followed"),
        ("rewards.0.source=pipe.py:f", "there is no file "),
        ("data.prompts=pipe.jsonl", "pipe.jsonl, but a directory, pipe or device"),
        ("data.prompts=pipe.parquet", "pipe.parquet, but a directory, pipe or device"),
        ("data.prompts=zero.jsonl", "/dev/zero, but a directory, pipe or device"),
        ("data.prompts=actor", "or a file that ends in .jsonl, .csv, .parquet"),
        ("data.prompts=directory.jsonl", "expected one that Dataset.save_to_disk wrote"),
        ("data.prompts=loop", "loop"),
        ("data.prompts=a\0b.jsonl", r"'a\x00b.jsonl' is no path that can be followed"),
        ("data.prompts=~nobody-of-that-name/x.jsonl", "'~nobody-of-that-name/x.jsonl' is no path"),
        (f"data.prompts={'a' * 5_000}.jsonl", "File name too long"),
        ("run.directory=a\0b", r"'a\x00b' is no path that can be followed"),
        ("run.directory=loop", "loop"),
        ("run.directory=~nobody-of-that-name", "'~nobody-of-that-name' is no path that can be followed"),
        ("run.directory=pipe.jsonl", "pipe.jsonl is no directory; choose another run.directory"),
        (f"run.steps={DIGITS}", "run.steps: expected a whole number"),
        (f"run.steps={DEEP}", "run.steps: expected a whole number"),
    ],
    ids=lambda text: text[:40].replace("\0", "NUL"),
)
def test_a_name_that_leads_nowhere_is_refused_by_name(
    folder: Path, override: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for pipe in ("pipe.jsonl", "pipe.parquet", "pipe.py"):
        if not (folder / pipe).exists():
            os.mkfifo(folder / pipe)
    for link, target in (("loop", "loop"), ("zero.jsonl", "/dev/zero")):
        if not os.path.lexists(folder / link):
            (folder / link).symlink_to(target)
    (folder / "directory.jsonl").mkdir(exist_ok=True)
    refused(oppo(folder, "", "run.name=nowhere", override), capsys, message)
    assert not (folder / "runs").exists()


CHAT = '{"prompt": [{"role": "user", "content": "w3"}]}'


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        (r'{"prompt": "\ud800 w3"}', "", r"column 'prompt': the policy's tokenizer cannot read '\ud800 w3' (str): "),
        (f'{{"prompt": "w3", "goal": {DIGITS}}}', "", "not valid JSON: Exceeds the limit"),
        (f'{{"prompt": "w3", "goal": {DEEP}}}', "", "not valid JSON: maximum recursion depth exceeded"),
        (CHAT, "{{ raise_exception('roles must alternate') }}", "'w3'}] (list): TemplateError: roles must alternate"),
        (CHAT, "{{ nothing.at.all }}", "the chat template of the policy's tokenizer cannot read "),
        (CHAT, "{% for %}", "TemplateSyntaxError: "),
        (CHAT, "{{ 1 / 0 }}", "ZeroDivisionError: "),
    ],
    ids=["a lone surrogate", "a long number", "deep", "raises", "undefined", "syntax", "divides by zero"],
)
def test_a_row_that_cannot_be_read_is_named_with_its_line(
    folder: Path, row: str, template: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = folder / "talking"
    shutil.copytree(folder / "actor", model, dirs_exist_ok=True)
    (model / "chat_template.jinja").write_text(template)
    (folder / "rows.jsonl").write_text(f'{{"prompt": "w3"}}\n{row}\n')
    code = oppo(folder, "--dry-run", f"models.policy={model}", "data.prompts=rows.jsonl")
    refused(code, capsys, f"error: {folder / 'rows.jsonl'}, line 2", message)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (os.mkfifo, "cannot read the configuration {file}: config.toml is no plain file"),
        (Path.mkdir, "cannot read the configuration {file}: "),
        (
            lambda file: file.symlink_to("/dev/zero"),
            "cannot read the configuration {file}: config.toml is no plain file",
        ),
        (lambda file: file.symlink_to(file), "cannot read the configuration {file}: "),
        (lambda file: file.write_bytes(b"a = '\xff'"), "{file} is not valid TOML: 'utf-8' codec can't decode"),
        (lambda file: file.write_text(f"a = {DEEP}"), "{file} is not valid TOML: "),
        (lambda file: file.write_text(f"[run]\nsteps = {DIGITS}"), "{file} is not valid TOML: Exceeds the limit"),
    ],
    ids=["pipe", "directory", "device", "loop", "not UTF-8", "deep", "a long number"],
)
def test_settings_that_cannot_be_read_are_refused_by_file(
    tmp_path: Path, make: Damage, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "config.toml"
    make(file)
    refused(main(["train", str(file)]), capsys, "error: ", message.format(file=file))


def test_a_nul_in_the_name_of_the_settings_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    refused(main(["train", "a\0b.toml"]), capsys, r"error: a\x00b.toml is not valid TOML: ")
