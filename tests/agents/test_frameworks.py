"""An agent framework as it is: what its loop sends is served, and what the policy and its tools say is trained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import openai
import pytest
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.openai import OpenAIProvider

from oppo import Overcommit
from oppo.agents import Agents
from oppo.agents.requests import ChatRequests
from oppo.events import Chunk, Drop
from oppo.hf.calls import ToolCall
from oppo.hf.chat import ParsedTurn
from oppo.turns import Answer
from tests.agents.conftest import Numbers
from tests.agents.test_agents import Rollout, call, client, tokenizer, tried
from tests.agents.test_agents_in_graphs import Players, described, trained


class Total(BaseModel):
    total: int


async def add(left: int, right: int = 1) -> int:
    """Add two numbers.

    Args:
        left: the first.
        right: the second.
    """
    return left + right


def model(to: openai.AsyncOpenAI, profile: ModelProfile | None = None) -> OpenAIChatModel:
    return OpenAIChatModel("policy", provider=OpenAIProvider(openai_client=to), profile=profile)


THINKING = "<think>\nwell\n</think>\n"
SUM = call("add", left=2, right=3)


@pytest.mark.parametrize(
    "turns",
    [
        ["5"],
        [SUM, "5"],
        [f"{SUM}\n{SUM}", THINKING + "5"],
        [THINKING + SUM, "So: " + SUM, "5"],
        [call("add", left="x"), call("subtract", left=2), "5"],
        ["", THINKING, SUM, "5"],
    ],
)
def test_what_a_framework_says_is_read_behind_what_the_policy_said(turns: Sequence[str]) -> None:
    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        result = await Agent(model(to), tools=[add], instructions="Count.", retries=9).run("2 + 3?")
        return float(result.output == str(row["gold"]))

    async def played(rollout: Rollout) -> tuple[Rollout, float | Drop]:
        answers = [await rollout.say(said) for said in turns]
        assert [isinstance(each, Answer) for each in answers] == [True] * (len(turns) - 1) + [False]
        return rollout, await rollout.reward()

    rollout, reward = tried(act, played)
    assert reward == 1.0
    said = [tokenizer().decode_whole(each.tokens.tolist()) for each in sampled(rollout)]
    assert said == [f"{turn}<|im_end|>" for turn in turns]
    assert rollout.text().count("<tool_response>") == "".join(turns).count("<tool_call>")


def sampled(rollout: Rollout) -> list[Chunk]:
    return [each for each in rollout.pieces if isinstance(each, Chunk)]


def test_an_output_type_is_asked_for_without_forcing_a_call() -> None:
    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        agent = Agent(model(to, {"supports_forced_tool_choice": False}), output_type=Total)
        return float((await agent.run("2 + 3?")).output.total)

    async def forced(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        return float((await Agent(model(to), output_type=Total).run("2 + 3?")).output.total)

    async def played(rollout: Rollout) -> float | Drop:
        assert isinstance(await rollout.say("5"), Answer)
        assert await rollout.say(call("final_result", total=5)) is None
        return await rollout.reward()

    assert tried(act, played) == 5.0
    with pytest.raises(Exception, match="tool_choice = 'required': the run samples with tool_choice = 'auto'"):
        tried(forced, played)


class Calling(Numbers):
    """Turns of 3 and 4 tokens call a tool."""

    roles = frozenset({"user", "tool"})

    def parse(self, turn: Sequence[int]) -> ParsedTurn:
        if len(turn) not in {3, 4}:
            return super().parse(turn)
        return ParsedTurn("", tool_calls=(ToolCall("count", {"number": len(turn)}, "c"),))


class Framed(Players):
    """Rows whose agent is a framework's."""

    def __post_init__(self) -> None:
        self.agents = Agents(self.run, tokenizer())

    async def run(self, row: dict[str, Any], base_url: str, key: str) -> float:
        async def count(number: int) -> int:
            return number - 1

        async with client(self.agents, key) as to:
            result = await Agent(model(to), tools=[count]).run(str(row["number"]))
        return float(result.output.partition(":")[0])


def test_its_loop_trains_steps_with_the_turns_of_the_policy_and_the_answers_of_its_tools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ChatRequests, "format", lambda self, tools: (Calling(), Calling()))
    pairs, metrics, reasons = trained(Framed(), Overcommit(batch=6, overcommit=3), 2)
    assert reasons == []
    assert [each["agents/refused"] for each in metrics] == [0, 0]
    assert sum(each["tools/call_frequency"] for each in metrics) > 0
    for score, response in pairs:
        pieces = response.pieces()
        turns = [each.tokens for each in pieces if isinstance(each, Chunk)]
        answers = [each.tokens.tolist() for each in pieces if not isinstance(each, Chunk)]
        assert len(turns) == 1 + response.prompt.admission % 3
        assert answers == [[90_000 + len(turn), *range(len(turn) - 1)] for turn in turns[:-1]]
        assert score == len(turns[-1])
    serial, streamed = described(trained(Framed(), Overcommit(batch=6), 2)[0]), described(pairs)
    assert len(serial.keys() & streamed.keys()) > 12
    assert all(serial[rollout] == streamed[rollout] for rollout in serial.keys() & streamed.keys())
