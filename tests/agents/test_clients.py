"""Clients of the endpoint as they are: OpenAI's own, and an agent framework."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, Literal

import anyio
import httpx2
import openai
import pytest
from hypothesis import example, given, strategies as st
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.profiles import ModelProfile
from pydantic_ai.providers.openai import OpenAIProvider

from oppo import Overcommit
from oppo.agents import Agents
from oppo.agents.requests import ChatRequests
from oppo.events import Chunk, Drop
from oppo.hf.chat import ParsedTurn
from oppo.hf.tool_calls import ToolCall
from oppo.testing import run_virtual
from oppo.turns import Answer
from tests.agents.conftest import Numbers
from tests.agents.test_agents import Rollout, acting, ask, client, conversing, rows, tokenizer, tried
from tests.agents.test_agents_in_graphs import Players, described, trained
from tests.kit.turns import call

Fault = Literal["unsent", "busy", "left", "lost"]

PATIENCE: Final = 1.0
SECONDS: Final = 3.0


@dataclass(frozen=True)
class Call:
    """A conversation of two requests.

    Attributes:
        question: what it asks first; that of an odd one is streamed.
        key: it says what it sends again, with an idempotency key.
        faults: what befalls the first attempts of both requests.
    """

    question: int
    key: bool
    faults: tuple[Sequence[Fault], Sequence[Fault]]


@dataclass(eq=False)
class Network(httpx2.AsyncBaseTransport):
    """Befalls the attempts of a client.

    Attributes:
        inner: where those go that are sent.
        faults: by request.
        sent: attempts that came there.
    """

    inner: httpx2.AsyncBaseTransport
    faults: dict[str, Sequence[Fault]] = field(default_factory=dict)
    sent: Counter[str] = field(default_factory=Counter)

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        name, attempt = request.headers["x-name"], int(request.headers["x-stainless-retry-count"])
        fault = dict(enumerate(self.faults[name])).get(attempt)
        if fault == "unsent":
            raise httpx2.ConnectError("no route")
        if fault == "busy":
            return httpx2.Response(503, request=request)
        self.sent[name] += 1
        with anyio.move_on_after(PATIENCE if fault == "left" else None):
            response = await self.inner.handle_async_request(request)
            await response.aread()
            if fault != "lost":
                return response
            raise httpx2.RemoteProtocolError("cut off")
        raise httpx2.ReadTimeout("too late")


async def asked(to: openai.AsyncOpenAI, call: Call, messages: Any, name: str) -> tuple[str, str]:
    headers = {"x-name": name} | ({"Idempotency-Key": name} if call.key else {})
    if not call.question % 2:
        reply = await ask(to, messages, extra_headers=headers)
        return reply.id, reply.choices[0].message.content
    async with to.chat.completions.stream(model="any", messages=messages, extra_headers=headers) as stream:
        final = await stream.get_final_completion()
        return final.id, str(final.choices[0].message.content)


def drawn(question: int, key: bool, faults: tuple[list[Fault], list[Fault]]) -> Call:
    # Without a key nothing tells a request that never came from an equal one that did.
    first, second = faults
    return Call(question, key, (first if key else [each for each in first if each == "left"], second))


FAULTS = st.lists(st.sampled_from(["unsent", "busy", "left", "lost"]), max_size=3)
CALLS = st.lists(st.builds(drawn, st.integers(0, 2), st.booleans(), st.tuples(FAULTS, FAULTS)), min_size=1, max_size=5)


@given(CALLS)
@example(
    [drawn(0, key, (["left"] * left, [])) for key, left in ((False, 1), (False, 0), (True, 0), (False, 0), (True, 1))]
)
def test_every_call_at_once_is_a_sample_of_its_own_whatever_befalls_its_attempts(calls: Sequence[Call]) -> None:
    heard = list[list[tuple[str, str]]]()
    networks, serving = list[Network](), list[Agents]()

    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        network = Network(httpx2.ASGITransport(serving[0].app))
        networks.append(network)
        own = to.with_options(http_client=httpx2.AsyncClient(transport=network), max_retries=4)
        own._platform = to._platform

        async def converse(number: int, call: Call) -> None:
            messages: Any = [{"role": "user", "content": f"Question {call.question}."}]
            replies = []
            for turn, faults in enumerate(call.faults):
                name = f"{number}.{turn}"
                network.faults[name] = faults
                replies.append(await asked(own, call, messages, name))
                messages += [{"role": "assistant", "content": replies[-1][1]}, {"role": "user", "content": "So?"}]
            heard.append(replies)

        async with anyio.create_task_group() as tasks:
            for number, call in enumerate(calls):
                tasks.start_soon(converse, number, call)
        return 1.0

    async def main() -> tuple[list[Rollout], Any]:
        async with acting(act, single="") as agents:
            serving.append(agents)
            rollout = Rollout(agents, await anext(agents.prompts(rows(5), max_prompt_tokens=2000)))
            found = await conversing(rollout, map("It is {}.".format, count()), SECONDS)
            return found, agents.samples()

    found, samples = run_virtual(main)
    said = [[tokenizer().decode(each.tokens.tolist()) for each in rollout.pieces[::2]] for rollout in found]
    assert sorted(said) == sorted([text for _, text in replies] for replies in heard)
    assert len({number for replies in heard for number, _ in replies}) == 2 * len(calls)
    sent = sum(networks[0].sent.values())
    assert (len(samples["agents/repeated"]), sum(samples["agents/repeated"])) == (sent, sent - 2 * len(calls))
    assert sum(samples["agents/refused"]) == 0


@pytest.mark.parametrize("kind", ["sync", "async"])
async def test_a_client_that_is_impatient_over_http_is_told_the_sample_that_it_had_asked_for(kind: str) -> None:
    options: Any = {"timeout": 0.3, "max_retries": 9}
    again = anyio.Event()

    async def run(row: dict[str, object], base_url: str, key: str) -> float:
        async with openai.AsyncOpenAI(base_url=base_url, api_key=key, **options) as to:
            return float((await ask(to, HELLO)).choices[0].message.content == "Hm.")

    def in_thread(row: dict[str, object], base_url: str, key: str) -> float:
        with openai.OpenAI(base_url=base_url, api_key=key, **options) as to:
            reply = to.chat.completions.create(model="any", messages=HELLO)
            return float(reply.choices[0].message.content == "Hm.")

    agents = Agents(run if kind == "async" else in_thread, tokenizer(), timeout=60)
    noted = agents._server.noted
    agents._server.noted = lambda *told: (noted(*told), again.set())[0]  # type: ignore[func-returns-value]
    async with agents:
        agents.single = ""
        rollout = Rollout(agents, await anext(agents.prompts(rows(5))))
        await again.wait()  # the first attempt was given up
        assert await rollout.say("Hm.") is None
        assert await rollout.reward() == 1.0
        assert agents.samples()["agents/conversations"] == [1.0]


HELLO: Any = [{"role": "user", "content": "Hello"}]


class Total(BaseModel):
    total: int


def test_what_the_client_would_have_the_server_enforce_is_refused_as_openai_does() -> None:
    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        with pytest.raises(openai.BadRequestError) as refused:
            await to.chat.completions.parse(model="any", messages=HELLO, response_format=Total)
        assert (refused.value.code, refused.value.type) == ("unsupported_value", "invalid_request_error")
        raw = await to.chat.completions.with_raw_response.create(model="any", messages=HELLO)
        assert raw.parse().choices[0].message.content == "Hm."
        return 1.0

    assert tried(act, lambda rollout: rollout.say("Hm.")) is None


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
    with pytest.raises(Exception, match="tool_choice = 'required': a call that is forced is sampled from other"):
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
