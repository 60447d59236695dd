"""Chats of a run as its settings have them rendered: the template, its variables, and tools."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, cast

import pytest

from oppo.cli import DONE, UNUSABLE
from oppo.config.load import resolve
from oppo.errors import ConfigError
from oppo.hf.calls import ToolCall
from oppo.hf.chat import ChatFormat, ParsedTurn
from oppo.placement import Thread
from oppo.run.checkpoint import settings_of
from oppo.run.models import policy_tokenizer
from oppo.run.rewards import UserCode
from tests.hf import tiny
from tests.hf.spot_tokenizers import byte_tokenizer
from tests.kit.workplace import oppo, records

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


def test_a_class_of_environments_is_refused_where_a_function_is_expected(folder: Path) -> None:
    (folder / "reward.py").write_text("def short(prompts, completions): return [0.0 for _ in completions]\n")
    (folder / "game.py").write_text("class Game:\n    def reset(self): ...\n    def play(self): ...\n")
    settings = resolve({**document(), "environment": {"source": "game.py:Game"}}, folder)
    with (
        Thread("scorers") as place,
        pytest.raises(ConfigError, match=r"game.py:Game' is a class .* environment.factory"),
    ):
        UserCode.of(settings, policy_tokenizer(settings), place)


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


TOOLS = """
def add(left: int, right: int = 1) -> int:
    \"""Add two numbers.

    Args:
        left: the first.
        right: the second.
    \"""
    return left + right

def bare(left):
    return left

def tool(turn):
    return None
"""
TRAINED = """
[run]
steps = 2
panel = "off"
[models]
policy = "actor"
[[rewards]]
source = "reward.py:short"
[environment]
tools = ["tools.py:add"]
max_turns = 2
[data]
prompts = "prompts.jsonl"
chat_template = "qwen3.jinja"
max_prompt_tokens = 1500
[sampling]
max_new_tokens = 400
stop = ["<|im_end|>", 10, 20, 30, 40, 50, 60, 70, 80, 90, 100, 110, 120, 130, 140, 150, 160, 170, 180, 190, 200]
[step]
algorithm = "grpo"
batch = 2
overcommit = 1
[algorithm]
samples = 2
"""


@pytest.fixture
def trained(folder: Path) -> Path:
    config = tiny.CONFIGS["llama"]()
    config.vocab_size, config.max_position_embeddings = 270, 2048
    tiny.of(config, seed=1).save_pretrained(folder / "actor")
    rows = [{"prompt": [{"role": "user", "content": f"What is {number} + 1?"}]} for number in range(8)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "tools.py").write_text(TOOLS)
    (folder / "reward.py").write_text(
        "def short(prompts, completions):\n    return [-len(c) / 100 for c in completions]\n"
    )
    (folder / "config.toml").write_text(TRAINED)
    return folder


def test_tools_of_the_settings_are_shown_called_answered_and_counted(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls(chat: ChatFormat, tokens: object) -> ParsedTurn:
        return ParsedTurn("", tool_calls=(ToolCall("add", {"left": 2}), ToolCall("subtract", {})))

    monkeypatch.setattr(ChatFormat, "parse", calls)  # a random policy calls nothing
    assert oppo(trained, "") == DONE
    fails = ParsedTurn("", tool_calls=(ToolCall("add", {"left": None}),))
    monkeypatch.setattr(ChatFormat, "parse", lambda chat, tokens: fails)
    assert oppo(trained, "", "run.name=dropping", "environment.on_failure=drop", "run.max_empty=1") != DONE
    lines = records(trained, "run", "metrics.jsonl")
    assert {line["tools/failure_frequency"] for line in lines} == {0.5}
    assert all(line["tools/call_frequency"] == 2 * (line["num_turns/mean"] - 1) > 0 for line in lines)
    samples = [each for each in records(trained, "run", "samples.jsonl") if "tool_response" in str(each["completion"])]
    assert all("<tool_response>\n3\n</tool_response>" in str(each["completion"]) for each in samples)
    assert all("Error: there is no tool 'subtract'; the tools are add" in str(each["completion"]) for each in samples)
    assert all('"name": "add"' in str(each["prompt"]) for each in samples)
    assert {line["num_turns/max"] for line in lines} <= {2, 3}
    assert all(line["num_turns/min"] <= line["num_turns/mean"] <= line["num_turns/max"] for line in lines)
    assert all(line["tools/add/seconds"] > 0 for line in lines)
    assert not any("tools/subtract/seconds" in line for line in lines)
    for each in samples:
        parts = cast("list[dict[str, str]]", each["parts"])
        assert [part["by"] for part in parts][:2] == ["policy", "tool"]
        assert all(("<tool_response>" in part["text"]) == (part["by"] == "tool") for part in parts)
    assert '<span class="tool"' in (trained / "runs" / "run" / "report.html").read_text(encoding="utf-8")
    assert samples


GAMES = """
class Game:
    resets = 0

    def reset(self, number=0, **row):
        assert "environment" not in row or "prompt" in row
        self.said = []
        Game.resets += 1
        return f" (below {number + 10})"

    def add(self, left: int) -> int:
        \"""Add.

        Args:
            left: the number.
        \"""
        self.said.append(left)
        return left + 1

    def get_reward(self):
        return float(len(self.said))

class Silent(Game):
    get_reward = None

def make():
    return Game()

def seen(completions, environments):
    for said in completions:
        assert said[0]["tool_calls"][1]["function"] == {"name": "add", "arguments": {"left": 3}}
        assert [each["content"] for each in said if each["role"] == "tool"] == ["3", "4"] * (len(said) // 3)
    return [float(len(each.said)) for each in environments]
"""


@pytest.fixture
def played(trained: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def calls(chat: ChatFormat, tokens: object) -> ParsedTurn:
        return ParsedTurn("", tool_calls=(ToolCall("add", {"left": 2}), ToolCall("add", {"left": 3})))

    monkeypatch.setattr(ChatFormat, "parse", calls)  # a random policy calls nothing
    (trained / "games.py").write_text(GAMES)
    rows = [
        {"prompt": [{"role": "user", "content": "Add."}], "number": n, "environment": ["one", "two"][n % 2]}
        for n in range(8)
    ]
    (trained / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = TRAINED.replace('[[rewards]]\nsource = "reward.py:short"\n', "")
    (trained / "config.toml").write_text(text.replace('tools = ["tools.py:add"]', 'factory = "games.py:Game"'))
    return trained


def test_a_class_of_the_settings_begins_prompts_answers_calls_and_gives_the_reward(played: Path) -> None:
    assert oppo(played, "") == DONE
    lines = records(played, "run", "metrics.jsonl")
    assert all(line["objective/scores"] == 2 * (line["num_turns/mean"] - 1) > 0 for line in lines)
    samples = records(played, "run", "samples.jsonl")
    assert all(re.search(r"Add. \(below 1\d\)", str(each["prompt"])) for each in samples)
    assert all('"name": "add"' in str(each["prompt"]) for each in samples)
    settings = resolve(settings_of(played / "runs" / "run").document(), played)
    assert [each.source for each in settings.rewards] == ["environment"]
    assert settings.files["environment.factory"] == played / "games.py"


def test_several_classes_are_chosen_by_a_column_beside_other_rewards(played: Path) -> None:
    several = "environment.factory={one='games.py:Game', two='games.py:make'}"
    rewards = "rewards=[{source='environment', name='won'}, {source='games.py:seen', name='seen', weight=10}]"
    assert oppo(played, "", several, rewards, "run.name=several", "step.overcommit=0") == DONE
    for line in records(played, "several", "metrics.jsonl"):
        assert line["rewards/won/mean"] == line["rewards/seen/mean"] > 0
        assert line["objective/scores"] == pytest.approx(11 * cast("float", line["rewards/won/mean"]))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["environment.tools=['tools.py:add']"], "environment.tools = .* answer calls, and environment.factory"),
        (["environment.process=true"], "instances of environment.factory are objects of this one: leave process out"),
        (["environment.factory=Game"], "environment.factory: expected file.py:name, or openenv:URL"),
        (["environment.factory={one='Game'}"], "environment.factory.one: expected file.py:name, or openenv:URL"),
        (["environment.factory=games.py:none"], "games.py has no 'none'"),
        (["environment.factory=games.py:seen"], "factory of environments .* raised TypeError"),
        (["environment.factory=games.py:Silent"], r"rewards.0: Silent has no method get_reward\(\), .* another source"),
        (["environment.factory="], r"\[rewards\] is missing"),
        (["environment.factory=", "environment.tools=['tools.py:add']", "rewards=['environment']"], "names none: give"),
        (["rewards=[{source='environment', timeout=1}]"], "unknown key 'rewards.0.timeout'"),
        (["environment.keep_special_tokens=true"], "environment.keep_special_tokens = true is for text of a function"),
        (["environment.factory={one='games.py:Game'}"], "expected one of one in the column 'environment'.* got 'two'"),
    ],
)  # fmt: skip
def test_classes_that_cannot_be_played_are_refused(
    played: Path, settings: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(played, "--dry-run", *settings) == UNUSABLE
    captured = capsys.readouterr()
    said = " ".join((captured.err + captured.out).split())
    assert re.search(words, said), said


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["environment.source=tools.py:tool"], "answers every turn, and environment.tools answer calls"),
        (["environment.keep_special_tokens=true"], "environment.keep_special_tokens = true is for text of a function"),
        (["environment.tools=[]"], "environment.max_turns = 2 is for tools: leave it out"),
        (["environment.tools=[]", "environment.on_failure=answer"], "environment.on_failure = 'answer' is for tools"),
        (["data.tools=tools.json"], "shows tools that nothing calls"),
        (['environment.tools=["add"]'], "expected file.py:function, got 'add'"),
        (['environment.tools=["tools.py:bare"]'], "tool 'bare' cannot be shown to the policy"),
        (['environment.tools=["tools.py:none"]'], "tools.py has no 'none'"),
        (["data.chat_template="], "has no chat template"),
        (["sampling.stop=[]"], r"ends what it says with '<\|im_end\|>', and no such token"),
    ],
)  # fmt: skip
def test_tools_that_cannot_be_called_are_refused(
    trained: Path, settings: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert oppo(trained, "--dry-run", *settings) == UNUSABLE
    captured = capsys.readouterr()
    said = " ".join((captured.err + captured.out).split())
    assert re.search(words, said), said
