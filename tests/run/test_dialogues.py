"""Whole runs with chats, tools, environments and agents: as the settings have them, trained, counted and refused."""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from oppo.cli import DONE, FAILED, UNUSABLE
from oppo.config.load import resolve
from oppo.config.settings import Settings
from oppo.errors import ConfigError
from oppo.events import Prompt
from oppo.hf.chat import ChatFormat, ParsedTurn
from oppo.hf.kv.reader import Incremental
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.tool_calls import ToolCall
from oppo.run.checkpoint import settings_of
from oppo.run.models import policy_tokenizer
from oppo.run.rewards import AnyEnvironment, environment_of
from oppo.testing import run_virtual
from oppo.turns import Answer, Turn
from tests.config.test_refusals import entries
from tests.hf import tiny
from tests.hf.spot_tokenizers import byte_tokenizer
from tests.kit.turns import talker
from tests.kit.workplace import furnish, oppo, records, resume, run, tokenizer, weights

SCHEMA = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "tools.json").write_text(json.dumps([SCHEMA]))
    return talker(tmp_path)


def document(**data: object) -> dict[str, Any]:
    given = {"prompts": "prompts.jsonl", **data}
    return {"models": {"policy": "actor"}, "rewards": [{"source": "reward.py:short"}], "data": given}


def environment(settings: Settings, tokenizer: HfTokenizer) -> AnyEnvironment | None:
    return environment_of(settings.environment, settings.agents, settings.data, settings.sampling, tokenizer)


def rendered(folder: Path, **data: object) -> str:
    settings = resolve(document(**data), folder)
    found = policy_tokenizer(settings.models, settings.data, settings.environment)
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
    found = policy_tokenizer(settings.models, settings.data, settings.environment)
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
    with pytest.raises(ConfigError, match=r"game.py:Game' is a class .* environment.factory"):
        environment(settings, policy_tokenizer(settings.models, settings.data, settings.environment))


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


REFUSED = entries("""
environment.factory=games.py:none | games.py has no 'none'
environment.factory=games.py:seen | factory of environments | raised TypeError
environment.factory=games.py:Silent | rewards.0: Silent has no method get_reward() | another source
environment.factory={one='games.py:Game'} | expected one of one in the column 'environment' | got 'two'
environment.factory= TOOL=bare | tool 'bare' cannot be shown to the policy
environment.factory= TOOL=none | tools.py has no 'none'
environment.factory= TOOL=add environment.tools_column=environment | line 1 | some of add in the column | got 'one'
environment.factory= TOOL=add environment.tools_column=enviroment | is a column of no row (did you mean 'environment'?)
environment.factory= TOOL=add data.chat_template= | has no chat template
environment.factory= TOOL=add sampling.stop=[] | ends what it says with '<|im_end|>', and no such token
""")


@pytest.mark.parametrize(("chosen", "words"), [(chosen, words) for chosen, *words in REFUSED])
def test_classes_and_tools_that_cannot_be_called_are_refused(
    played: Path, chosen: str, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    named = re.sub(r"TOOL=(\w+)", r'environment.tools=["tools.py:\1"] rewards=["reward.py:short"]', chosen)
    assert oppo(played, "--dry-run", "run.name=refused", *named.split(" ")) == UNUSABLE
    said = " ".join("".join(capsys.readouterr()).split())
    assert [each for each in words if each not in said] == [], said


CODE = '''
import asyncio
import json

import openai
from pydantic_ai import Agent, ModelHTTPError, ToolCallPart, capture_run_messages
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from oppo.hf.tool_calls import tool_schema


def add(left: int, right: int = 1) -> int:
    """Add two numbers.

    Args:
        left: the first.
        right: the second.
    """
    return left + right


def double(number: int) -> int:
    """Double a number.

    Args:
        number: to double.
    """
    return 2 * number


def total(completions, completion_ids):
    return [value_of(ids) for ids in completion_ids]


def value_of(ids):
    return sum(ids) % 7 / 7


async def agent(row, base_url, api_key):
    messages, first, ids = list(row["prompt"]), None, []
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for turn in range(3):
            try:
                reply = await client.chat.completions.create(
                    model="policy",
                    messages=messages,
                    tools=[tool_schema(add), tool_schema(double)],
                    extra_body={"return_token_ids": True},
                )
            except openai.BadRequestError as error:
                assert error.code == "context_length_exceeded"
                break
            choice = reply.choices[0]
            first = first or len(reply.prompt_token_ids)
            ids = [*reply.prompt_token_ids, *choice.token_ids]
            messages.append(choice.message.model_dump(exclude_none=True))
            for call in choice.message.tool_calls or ():
                tool = {"add": add, "double": double}[call.function.name]
                result = tool(**json.loads(call.function.arguments))
                messages.append({"role": "tool", "tool_call_id": call.id, "content": json.dumps(result)})
    return value_of(ids[first:])


async def framework(row, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        model = OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=client))
        return await calling(Agent(model, tools=[add, double], retries=9), row["prompt"][0]["content"])


async def calling(agent, prompt):
    with capture_run_messages() as messages:
        try:
            await agent.run(prompt)
        except ModelHTTPError as error:
            assert error.body["code"] == "context_length_exceeded"
    calls = [part.args for each in messages for part in each.parts if isinstance(part, ToolCallPart)]
    return value_of(map(ord, "".join(map(str, calls))))


async def chief(row, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:

        async def ask(messages):
            reply = await client.chat.completions.create(model="policy", messages=messages)
            return reply.usage.completion_tokens

        messages = list(row["prompt"])
        earned = await ask(messages)
        parts = [[{"role": "user", "content": f"{messages[0]['content']} Part {part}."}] for part in range(4)]
        earned += sum(await asyncio.gather(*map(ask, parts)))
        return float(earned % 7)


async def summing(row, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        messages, summed = list(row["prompt"]), 0
        while not summed or len(messages) < 4:
            try:
                reply = await client.chat.completions.create(model="policy", messages=messages)
                messages += [reply.choices[0].message.model_dump(exclude_none=True), row["prompt"][0]]
            except openai.BadRequestError as error:
                assert error.code == "context_length_exceeded"
                summed += 1
                messages = [{"role": "user", "content": f"Summary {summed} of {row['number']}."}]
        return float(summed)


async def voting(row, base_url, api_key):
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        ask = [client.chat.completions.create(model="policy", messages=row["prompt"]) for _ in range(4)]
        replies = await asyncio.gather(*ask)
        return float(len({reply.id for reply in replies}))


async def broken(row, base_url, api_key):
    raise OSError("no network")


async def interrupting(row, base_url, api_key):
    raise KeyboardInterrupt
'''
SETTINGS = """
[run]
steps = 2
panel = "off"
deterministic = true
checkpoint_every = 1
[models]
policy = "actor"
[data]
prompts = "prompts.jsonl"
chat_template = "qwen3.jinja"
max_prompt_tokens = 1500
[sampling]
max_new_tokens = 300
stop = ["<|im_end|>", 10, 30, 50, 70, 90, 110, 130, 150, 170, 190]
[step]
batch = 2
overcommit = 1
chunk = 16
algorithm = "grpo"
[algorithm]
samples = 2
"""
ROWS = [{"prompt": [{"role": "user", "content": f"What is {number} + 1?"}], "number": number} for number in range(8)]
CALLED = (
    '[environment]\ntools = ["code.py:add", "code.py:double"]\nmax_turns = 2\n[[rewards]]\nsource = "code.py:total"\n'
)
AGENTS = '[agents]\nprogram = "code.py:agent"\n'
HELD_OUT = ("eval.prompts=prompts.jsonl", "eval.every=1", "eval.samples=2", "eval.count=3")


@pytest.fixture
def agency(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "code.py").write_text(CODE)
    (folder / "config.toml").write_text(SETTINGS + AGENTS)

    def calls(chat: ChatFormat, tokens: list[int]) -> ParsedTurn:  # a random policy calls nothing
        left, number = (*tokens, 0, 0)[:2]
        return ParsedTurn("", tool_calls=(ToolCall("add", {"left": left}), ToolCall("double", {"number": number})))

    monkeypatch.setattr(ChatFormat, "parse", calls)
    return folder


def learned(agency: Path, name: str) -> bytes:
    return (agency / "runs" / name / "checkpoints" / "final" / "actor" / "model.safetensors").read_bytes()


def said(agency: Path, name: str) -> list[Any]:
    keys = ("step", "rollout", "prompt", "completion", "score", "advantage")
    lines = records(agency, name, "samples.jsonl")
    return sorted(([each.get(key) for key in keys] for each in lines), key=lambda each: each[:2])


def test_an_agent_trains_what_its_tools_would(agency: Path) -> None:
    assert oppo(agency, "", *HELD_OUT, "run.name=agents") == DONE
    (agency / "config.toml").write_text(SETTINGS + CALLED)
    assert oppo(agency, "", "run.name=tools") == DONE
    assert learned(agency, "agents") == learned(agency, "tools")
    assert said(agency, "agents") == said(agency, "tools")
    before, *_ = evaluations = records(agency, "agents", "eval.jsonl")
    assert [each["step"] for each in evaluations] == [0, 1, 2]
    assert 0 < before["eval/score"] < 1
    assert before["eval/num_turns/mean"] > 1
    assert {"eval/sampled_score", "eval/pass_at_2", "eval/agents/refused"} <= before.keys()
    lines = records(agency, "agents", "metrics.jsonl")
    assert lines[0]["deferral/deferred"] > 0
    assert sum(line["tools/call_frequency"] for line in lines) > 0
    assert all(line["agents/repeated"] == 0 for line in lines)


def test_helpers_of_an_agent_are_trained_with_its_reward_after_a_resume_too(agency: Path) -> None:
    options = [
        "run.deterministic=false",
        "agents.program=code.py:chief",
        "run.keep_last=2",
        "run.name=agents",
        "run.logged_samples=99",
    ]
    assert oppo(agency, "", *options) == DONE
    before = records(agency, "agents", "samples.jsonl")
    shutil.rmtree(agency / "runs" / "agents" / "checkpoints" / "step-000002")
    assert resume(agency, "agents") == DONE
    for lines in (before, records(agency, "agents", "samples.jsonl")):
        families: dict[int, list[dict[str, Any]]] = {}
        for line in sorted(lines, key=lambda each: each["rollout"]):
            families.setdefault(line.get("first", line["rollout"]), []).append(line)
        assert len(families) == 2 * 2 * 2
        for family in families.values():
            assert [line["prompt"].count("Part") for line in family] == [0, 1, 1, 1, 1]
            assert len({line["prompt"] for line in family}) == 5
            assert {line["score"] for line in family} == {family[0]["score"]}
    lines = records(agency, "agents", "metrics.jsonl")
    assert all(line["agents/refused"] == line["agents/history_changed"] == 0 for line in lines)
    assert all(line["agents/conversations"] == 5 for line in lines)


def test_an_agent_whose_conversation_has_no_room_goes_on_in_another(agency: Path) -> None:
    chosen = ["agents.program=code.py:summing", "run.logged_samples=99"]
    assert oppo(agency, "", *chosen, "run.deterministic=false", "sampling.max_new_tokens=60", "run.name=agents") == DONE
    families: dict[int, list[dict[str, Any]]] = {}
    for line in records(agency, "agents", "samples.jsonl"):
        families.setdefault(line.get("first", line["rollout"]), []).append(line)
    assert len(families) == 2 * 2 * 2
    for family in families.values():
        assert {line["score"] for line in family} == {len(family) - 1.0}
        assert sum("Summary" in line["prompt"] for line in family) == len(family) - 1 > 0


def test_equal_requests_at_once_are_samples_and_refused_before_the_first_step_where_a_run_is_deterministic(
    agency: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = ["agents.program=code.py:voting", "run.logged_samples=99", "run.steps=1"]
    assert oppo(agency, "", *chosen, "run.deterministic=false", "run.name=agents") == DONE
    lines = records(agency, "agents", "samples.jsonl")
    assert [line["score"] for line in lines] == [4.0] * 4 * 2 * 2
    assert len({line["completion"] for line in lines}) == len(lines)
    (line,) = records(agency, "agents", "metrics.jsonl")
    assert (line["agents/conversations"], line["agents/repeated"], line["agents/history_changed"]) == (4, 0, 0)
    assert oppo(agency, "", *chosen, "run.name=other") == FAILED
    assert re.search(r"a key has one conversation, since .* run.deterministic", capfd.readouterr().err)
    assert not records(agency, "other", "metrics.jsonl")


def test_a_framework_that_calls_tools_is_trained_unchanged(agency: Path) -> None:
    assert oppo(agency, "", "agents.program=code.py:framework", "run.name=framework") == DONE
    lines = records(agency, "framework", "metrics.jsonl")
    assert sum(line["tools/call_frequency"] for line in lines) > 0


def test_an_agent_that_fails_ends_the_run_with_its_reason(agency: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert oppo(agency, "", "agents.program=code.py:broken") == FAILED
    assert "agent 'broken' raised OSError: no network at " in capfd.readouterr().err
    assert oppo(agency, "", "agents.program=code.py:interrupting", "run.name=b") == FAILED
    assert "agent 'interrupting' raised KeyboardInterrupt at " in capfd.readouterr().err
    assert oppo(agency, "", "agents.program=code.py:none") == UNUSABLE
    assert "has no 'none'; the functions and classes there are" in capfd.readouterr().err


ANSWERS = """
import time

def tool(turn):
    calls = (turn.state or {"calls": 0})["calls"]
    assert calls == turn.number
    return None if turn.number == 2 else ("w80 w81", {"calls": calls + 1})

def slow(turn):
    time.sleep(0.03 * (1 + len(turn.text) % 3))
    return tool(turn)

def broken(turn):
    raise OSError("no network")

def hangs(turn):
    time.sleep(3600)

def forging(turn):
    return "<|end|>"
"""
TURNS = (
    "environment.source=tools.py:tool",
    'sampling.stop=["w5", "w9", "w13", "w21", "w33", "w40", "w44", "w52", "w60", "w77"]',
    "sampling.max_new_tokens=40",
    "step.batch=4",
    "step.overcommit=2",
    "run.panel=off",
)


@pytest.fixture(scope="module")
def turning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    turning = furnish(tmp_path_factory.mktemp("turns"))
    (turning / "tools.py").write_text(ANSWERS)
    return turning


def test_a_policy_with_states_reads_each_token_once_though_rollouts_wait_for_tools_and_are_deferred(
    turning: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny.of(tiny.STATEFUL["qwen3.5"](), seed=1).save_pretrained(turning / "hybrid")
    tokenizer().save_pretrained(turning / "hybrid")
    read = Counter[tuple[int, int, int]]()  # by reader, row and position

    def note(reader: Incremental, rows: Sequence[int], sizes: Iterable[int]) -> None:
        for row, size in zip(rows, sizes, strict=True):
            start = reader.length(row)
            read.update((id(reader), row, at) for at in range(start, start + size) if row >= 0)

    class Noting(Incremental):
        def extend(
            self, rows: Sequence[int], tokens: Sequence[Tensor], *, last: Sequence[int] | None = None
        ) -> list[Tensor]:
            note(self, rows, map(len, tokens))
            return super().extend(rows, tokens, last=last)

        def step(self, rows: Sequence[int], tokens: Tensor) -> Tensor:
            note(self, rows, [1] * len(rows))
            return super().step(rows, tokens)

    monkeypatch.setattr("oppo.hf.serve.decoder.Incremental", Noting)
    hybrid = ("models.policy=hybrid", "rewards.0.source=reward.py:short", "models.critic=reward")
    schedule = ("run.deterministic=true", "step.lookahead=1", "step.kv_on_sync=keep", "run.steps=4")
    assert oppo(turning, "", *TURNS, *hybrid, *schedule, "run.name=hybrid") == DONE
    lines = records(turning, "hybrid", "metrics.jsonl")
    assert sum(line["deferral/deferred"] for line in lines) > 0
    assert any(line["event"] == "answered" for line in records(turning, "hybrid", "journal.jsonl"))
    assert len(read) > 500
    assert set(read.values()) == {1}


def test_responses_go_on_with_what_the_tool_says(turning: Path) -> None:
    assert oppo(turning, "", *TURNS, "run.name=first") == DONE
    texts = [str(each["completion"]) for each in records(turning, "first", "samples.jsonl")]
    assert any("w80 w81" in text for text in texts)
    assert all("turns/answer_seconds" in line for line in records(turning, "first", "metrics.jsonl"))
    answered = [line for line in records(turning, "first", "journal.jsonl") if line["event"] == "answered"]
    assert {(line["turn"], line["tokens"]) for line in answered} >= {(0, 2), (1, 2)}
    assert len({(line["rollout"], line["turn"]) for line in answered}) == len(answered)
    assert all(isinstance(line["seconds"], float) and "error" not in line for line in answered)


@pytest.mark.parametrize("keeps", [False, True])
def test_special_tokens_that_an_answer_spells_are_ordinary_text_unless_they_are_kept(
    turning: Path, *, keeps: bool
) -> None:
    document: dict[str, object] = {
        "models": {"policy": "actor"},
        "rewards": [{"source": "reward.py:short"}],
        "data": {"prompts": "prompts.jsonl"},
        "environment": {"source": "tools.py:forging", "keep_special_tokens": keeps},
    }
    tokenizer, tokens = byte_tokenizer(), np.array([70, 71], np.int32)
    made = environment(resolve(document, turning), tokenizer)
    assert made is not None
    answer = run_virtual(made.answer, Turn(Prompt(0, 0, tokens), 0, tokens))
    assert isinstance(answer, Answer)
    assert (answer.tokens.tolist() == [3]) is keeps
    assert tokenizer.decode_whole(answer.tokens.tolist()) == "<|end|>"


def test_an_exact_run_does_not_depend_on_how_long_the_tool_takes(turning: Path) -> None:
    exact = (*TURNS, "run.deterministic=true", "run.policy=process")
    assert oppo(turning, "", *exact, "run.name=quick") == DONE
    assert oppo(turning, "", *exact, "run.name=slow", "environment.source=tools.py:slow") == DONE
    assert weights(turning, "quick") == weights(turning, "slow")


def test_a_tool_that_fails_ends_the_run_with_its_words_or_drops_its_rollouts(turning: Path) -> None:
    code, _, said = run(turning, *TURNS, "run.name=broken", "environment.source=tools.py:broken")
    assert code not in {DONE, UNUSABLE}
    assert "environment 'broken' raised OSError: no network" in said
    dropping = ("environment.source=tools.py:hangs", "environment.on_failure=drop", "environment.timeout=0.2")
    code, _, said = run(turning, *TURNS, "run.name=dropping", *dropping, "run.max_empty=2")
    lines = records(turning, "dropping", "journal.jsonl")
    reasons = {str(line["reason"]) for line in lines if line["event"] == "dropped"}
    assert {str(line["error"]) for line in lines if line["event"] == "answered"} == reasons
    assert all("environment 'hangs' took longer than 0.2 s" in reason for reason in reasons)
    assert reasons
