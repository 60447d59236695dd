"""Chats of a run as its settings have them rendered: the template, its variables, and tools."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from oppo.config.load import resolve
from oppo.errors import ConfigError
from oppo.run.models import policy_tokenizer
from tests.hf.spot_tokenizers import byte_tokenizer

TEMPLATES = Path(__file__).parents[1] / "hf" / "templates"
SPECIAL = ("<|im_start|>", "<|im_end|>", "</tool_call>")
SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    byte_tokenizer(special=SPECIAL).save(tmp_path / "actor")
    (tmp_path / "actor" / "config.json").write_text("{}")
    (tmp_path / "qwen3.jinja").write_text((TEMPLATES / "qwen3.jinja").read_text())
    (tmp_path / "tools.json").write_text(json.dumps([SCHEMA]))
    return tmp_path


def document(**data: object) -> dict[str, Any]:
    given = {"prompts": "prompts.jsonl", **data}
    return {"models": {"policy": "actor"}, "rewards": [{"source": "reward.py:short"}], "data": given}


def rendered(folder: Path, **data: object) -> str:
    found = policy_tokenizer(resolve(document(**data), folder))
    return found.decode_whole(found.encode_chat([{"role": "user", "content": "hello"}]))


def test_a_template_its_variables_and_tools_are_those_of_the_settings(folder: Path) -> None:
    text = "{% for m in messages %}{{ m.content }}{% endfor %}{{ mood }}!"
    assert rendered(folder, chat_template=text, chat_template_kwargs={"mood": "so"}) == "helloso!"
    quiet = {"chat_template": "qwen3.jinja", "chat_template_kwargs": {"enable_thinking": False}, "tools": "tools.json"}
    said = rendered(folder, **quiet)
    assert "<tools>\n" + json.dumps(SCHEMA) in said
    assert said.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")


def test_the_template_is_saved_with_the_policy_and_its_files_are_those_of_the_run(folder: Path, tmp_path: Path) -> None:
    settings = resolve(document(chat_template="qwen3.jinja", tools="tools.json"), folder)
    found = policy_tokenizer(settings)
    found.save(tmp_path / "saved")
    saved = {each.name: each.read_text() for each in (tmp_path / "saved").iterdir()}
    assert any("<tool_response>" in text for text in saved.values())
    assert settings.files["data.chat_template"] == folder / "qwen3.jinja"
    assert settings.files["data.tools"] == folder / "tools.json"
    assert resolve(settings.document(), Path("/")) == settings


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"chat_template": "none.jinja"}, r"data.chat_template: .*none.jinja cannot be read: FileNotFoundError"),
        ({"chat_template": "{% for %}"}, r"chat template cannot be read: .* \(line 1\)"),
        ({"chat_template_kwargs": {"a": 1}}, "has no chat template that reads them: set data.chat_template"),
        (
            {"chat_template": "qwen3.jinja", "chat_template_kwargs": {"thinking": False}},
            "does not read 'thinking'; the variables that can be set are .*enable_thinking",
        ),
        ({"chat_template": "qwen3.jinja", "chat_template_kwargs": {"messages": []}}, "does not read 'messages'"),
        ({"chat_template": "{{ messages }}", "tools": "tools.json"}, "shows no tools: set data.chat_template"),
        ({"chat_template": "qwen3.jinja", "tools": "qwen3.jinja"}, r"data.tools: .*qwen3.jinja is no JSON"),
        ({"chat_template": "qwen3.jinja", "tools": "odd.json"}, r"holds \{'name': 'add'\}.*: expected a list of"),
    ],
)
def test_what_a_template_does_not_read_is_refused(folder: Path, data: dict[str, object], words: str) -> None:
    (folder / "odd.json").write_text('{"name": "add"}')
    with pytest.raises(ConfigError, match=words):
        rendered(folder, **data)
