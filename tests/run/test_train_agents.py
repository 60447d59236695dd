"""``oppo train`` with an agent behind a real OpenAI client: the run is, bit for bit, that with the same tools."""

from __future__ import annotations

import json
import re
import shutil
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oppo.cli import DONE, FAILED, UNUSABLE
from oppo.environments import Tools
from oppo.events import Batch
from oppo.hf.calls import ToolCall
from oppo.hf.chat import ChatFormat, ParsedTurn
from oppo.observe import Observer
from oppo.run.train import train
from oppo.signals import Stopped
from oppo.turns import Turn
from tests.hf import tiny
from tests.hf.spot_tokenizers import byte_tokenizer
from tests.kit import paced
from tests.kit.workplace import oppo, records, resume

TEMPLATE = (Path(__file__).parents[1] / "hf" / "templates" / "qwen3.jinja").read_text(encoding="utf-8")

CODE = '''
import asyncio
import inspect
import json

import openai
from pydantic_ai import Agent, ModelHTTPError, ToolCallPart, capture_run_messages
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

from oppo.hf.calls import tool_schema


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
                result = await result if inspect.isawaitable(result) else result
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
PACED = (
    CODE.replace("def add(", "from tests.kit import paced\n\n\nasync def add(")
    .replace("    return left + right", "    await paced.calls.pace()\n    return left + right")
    .replace("choice = reply", 'paced.turn.set((row["number"], turn))\n            choice = reply')
)
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
"""
ROWS = [{"prompt": [{"role": "user", "content": f"What is {number} + 1?"}], "number": number} for number in range(8)]
TOOLS = (
    '[environment]\ntools = ["code.py:add", "code.py:double"]\nmax_turns = 2\n[[rewards]]\nsource = "code.py:total"\n'
)
AGENTS = '[agents]\nprogram = "code.py:agent"\n'
HELD_OUT = ("eval.prompts=prompts.jsonl", "eval.every=1", "eval.samples=2", "eval.count=3")
ALGORITHMS = {
    "grpo": ["step.algorithm=grpo", "algorithm.samples=2"],
    "ppo": ["step.algorithm=ppo", "models.critic=critic"],
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = tiny.CONFIGS["llama"]()
    config.vocab_size, config.max_position_embeddings = 270, 2048
    tiny.of(config, seed=1).save_pretrained(tmp_path / "actor")
    config.num_labels = 1
    tiny.scalar_of(config).save_pretrained(tmp_path / "critic")
    for name in ("actor", "critic"):
        byte_tokenizer(special=("<|im_start|>", "<|im_end|>", "</tool_call>")).save(tmp_path / name)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (tmp_path / "qwen3.jinja").write_text(TEMPLATE)
    (tmp_path / "code.py").write_text(CODE)
    (tmp_path / "config.toml").write_text(SETTINGS + AGENTS)

    def calls(chat: ChatFormat, tokens: list[int]) -> ParsedTurn:  # a random policy calls nothing
        left, number = (*tokens, 0, 0)[:2]
        return ParsedTurn("", tool_calls=(ToolCall("add", {"left": left}), ToolCall("double", {"number": number})))

    monkeypatch.setattr(ChatFormat, "parse", calls)
    return tmp_path


def weights(folder: Path, name: str) -> bytes:
    return (folder / "runs" / name / "checkpoints" / "final" / "actor" / "model.safetensors").read_bytes()


def said(folder: Path, name: str) -> list[Any]:
    keys = ("step", "rollout", "prompt", "completion", "score", "advantage")
    lines = records(folder, name, "samples.jsonl")
    return sorted(([each.get(key) for key in keys] for each in lines), key=lambda each: each[:2])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_an_agent_trains_what_its_tools_would_in_serial_streamed_and_resumed_runs(folder: Path, algorithm: str) -> None:
    chosen = ALGORITHMS[algorithm]
    assert oppo(folder, "", *chosen, "run.name=agents") == DONE
    assert oppo(folder, "", *chosen, "run.name=other", "step.chunk=whole", *HELD_OUT) == DONE
    (folder / "config.toml").write_text(SETTINGS + TOOLS)
    assert oppo(folder, "", *chosen, "run.name=tools") == DONE
    assert weights(folder, "agents") == weights(folder, "other") == weights(folder, "tools")
    assert said(folder, "agents") == said(folder, "tools")
    before, *_ = evaluations = records(folder, "other", "eval.jsonl")
    assert [each["step"] for each in evaluations] == [0, 1, 2]
    assert 0 < before["eval/score"] < 1
    assert before["eval/num_turns/mean"] > 1
    assert {"eval/sampled_score", "eval/pass_at_2", "eval/agents/refused"} <= before.keys()
    lines = records(folder, "agents", "metrics.jsonl")
    assert algorithm == "ppo" or lines[0]["deferral/deferred"] > 0
    assert sum(line["tools/call_frequency"] for line in lines) > 0
    assert all(line["agents/repeated"] == 0 for line in lines)
    samples = said(folder, "agents")
    shutil.rmtree(folder / "runs" / "agents" / "checkpoints" / "step-000002")
    assert resume(folder, "agents") == DONE, "agents are told the turns of deferred rollouts again"
    assert weights(folder, "agents") == weights(folder, "tools")
    assert said(folder, "agents") == samples


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_helpers_of_an_agent_are_trained_with_its_reward_after_a_resume_too(folder: Path, algorithm: str) -> None:
    options = [
        "run.deterministic=false",
        "agents.program=code.py:chief",
        "run.keep_last=2",
        "run.name=agents",
        "run.logged_samples=99",
    ]
    assert oppo(folder, "", *ALGORITHMS[algorithm], *options) == DONE
    before = records(folder, "agents", "samples.jsonl")
    shutil.rmtree(folder / "runs" / "agents" / "checkpoints" / "step-000002")
    assert resume(folder, "agents") == DONE
    for lines in (before, records(folder, "agents", "samples.jsonl")):
        families: dict[int, list[dict[str, Any]]] = {}
        for line in sorted(lines, key=lambda each: each["rollout"]):
            families.setdefault(line.get("first", line["rollout"]), []).append(line)
        assert len(families) == 2 * 2 * (2 if algorithm == "grpo" else 1)
        for family in families.values():
            assert [line["prompt"].count("Part") for line in family] == [0, 1, 1, 1, 1]
            assert len({line["prompt"] for line in family}) == 5
            assert {line["score"] for line in family} == {family[0]["score"]}
    lines = records(folder, "agents", "metrics.jsonl")
    assert all(line["agents/refused"] == line["agents/history_changed"] == 0 for line in lines)
    assert all(line["agents/conversations"] == 5 for line in lines)


def test_an_agent_whose_conversation_has_no_room_goes_on_in_another(folder: Path) -> None:
    chosen = [*ALGORITHMS["grpo"], "agents.program=code.py:summing", "run.logged_samples=99"]
    assert oppo(folder, "", *chosen, "run.deterministic=false", "sampling.max_new_tokens=60", "run.name=agents") == DONE
    families: dict[int, list[dict[str, Any]]] = {}
    for line in records(folder, "agents", "samples.jsonl"):
        families.setdefault(line.get("first", line["rollout"]), []).append(line)
    assert len(families) == 2 * 2 * 2
    for family in families.values():
        assert {line["score"] for line in family} == {len(family) - 1.0}
        assert sum("Summary" in line["prompt"] for line in family) == len(family) - 1 > 0


def test_equal_requests_at_once_are_samples_and_refused_before_the_first_step_where_a_run_is_deterministic(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    chosen = [*ALGORITHMS["grpo"], "agents.program=code.py:voting", "run.logged_samples=99", "run.steps=1"]
    assert oppo(folder, "", *chosen, "run.deterministic=false", "run.name=agents") == DONE
    lines = records(folder, "agents", "samples.jsonl")
    assert [line["score"] for line in lines] == [4.0] * 4 * 2 * 2
    assert len({line["completion"] for line in lines}) == len(lines)
    (line,) = records(folder, "agents", "metrics.jsonl")
    assert (line["agents/conversations"], line["agents/repeated"], line["agents/history_changed"]) == (4, 0, 0)
    assert oppo(folder, "", *chosen, "run.name=other") == FAILED
    assert re.search(r"a key has one conversation, since .* run.deterministic", capfd.readouterr().err)
    assert not records(folder, "other", "metrics.jsonl")


ROUNDING = 1e-5
"""Which rollouts share a forward pass depends on timing: that moved no number by more than 3.4e-6."""


class Batches(Observer):
    """Keeps what is trained; may end a run in its first step.

    Attributes:
        trained: by step.
        waiting: turns whose calls were unanswered when a step ended, by step.
    """

    def __init__(self, *, cut: bool = False) -> None:
        self.trained: dict[int, Batch] = {}
        self.waiting: dict[int, list[tuple[int, int]]] = {}
        self._cut = cut

    def on_item(self, step: int, stage: str, item: object, at: float) -> None:
        if isinstance(item, Batch) and item.advantages is not None:
            self.trained[step] = item
            if self._cut:
                signal.raise_signal(signal.SIGTERM)

    def on_step(self, step: int, result: object, channels: Mapping[str, Mapping[str, int]]) -> None:
        self.waiting[step] = [*paced.calls.waiting]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_run_that_ends_in_the_middle_of_calls_is_resumed_as_if_it_had_not_ended(
    folder: Path, algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples, answer = (2 if algorithm == "grpo" else 1), Tools.answer
    options = (
        *ALGORITHMS[algorithm],
        "run.deterministic=false",
        "sampling.max_new_tokens=400",
        "trainer.epochs=1",
        "trainer.learning_rate=1e-3",
    )

    async def known(tools: Tools, turn: Turn) -> Any:
        paced.turn.set((turn.prompt.admission, turn.number))
        return await answer(tools, turn)

    def made(source: Path, *overrides: str, cut: bool = False) -> dict[int, Batch]:
        monkeypatch.setattr(paced, "calls", paced.Calls(samples))
        seen = Batches(cut=cut)
        with pytest.raises(Stopped) if cut else nullcontext():
            train(source, overrides, prompts=iter(ROWS), observers=[seen])
        if 0 in seen.trained:
            assert seen.waiting[0] == [(2, 1)] * samples
        return seen.trained

    monkeypatch.setattr(Tools, "answer", known)
    (folder / "code.py").write_text(PACED)
    for name, code in {"tools": TOOLS, "agents": AGENTS}.items():
        (folder / f"{name}.toml").write_text(SETTINGS + code)
    whole = made(folder / "tools.toml", *options, "run.name=whole")
    for name in ("tools", "agents"):
        before = made(folder / f"{name}.toml", *options, f"run.name={name}", cut=True)
        after = made(folder / "runs" / name)
        assert [*before, *after] == [0, 1]
        assert {*after[1].versions[after[1].sampled].tolist()} == {0, 1}
        for batch, other in zip(whole.values(), [before[0], after[1]], strict=True):
            assert batch.rollouts == other.rollouts
            for column in ("offsets", "tokens", "sampled", "versions", "scores"):
                assert np.array_equal(getattr(batch, column), getattr(other, column)), column
            for column in ("logprobs", "reference", "values", "rewards", "advantages", "returns"):
                numbers, others = getattr(batch, column), getattr(other, column)
                assert (numbers is None) is (others is None)
                if numbers is not None:
                    assert np.abs(numbers - others).max() < ROUNDING, column


def test_a_framework_that_calls_tools_is_trained_unchanged(folder: Path) -> None:
    chosen = [*ALGORITHMS["grpo"], "agents.program=code.py:framework"]
    assert oppo(folder, "", *chosen, "run.name=streamed") == DONE
    assert oppo(folder, "", *chosen, "run.name=serial", "step.chunk=whole") == DONE
    lines = records(folder, "streamed", "metrics.jsonl")
    assert sum(line["tools/call_frequency"] for line in lines) > 0
    assert weights(folder, "streamed") == weights(folder, "serial")


def test_an_agent_that_fails_ends_the_run_with_its_reason(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert oppo(folder, "", *ALGORITHMS["grpo"], "agents.program=code.py:broken") == FAILED
    assert "agent 'broken' raised OSError: no network at " in capfd.readouterr().err
    assert oppo(folder, "", *ALGORITHMS["grpo"], "agents.program=code.py:interrupting", "run.name=b") == FAILED
    assert "agent 'interrupting' raised KeyboardInterrupt at " in capfd.readouterr().err
    assert oppo(folder, "", *ALGORITHMS["grpo"], "agents.program=code.py:none") == UNUSABLE
    assert "has no 'none'; the functions and classes there are" in capfd.readouterr().err
