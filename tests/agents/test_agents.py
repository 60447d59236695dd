"""Agents behind an OpenAI client: their requests become prompts and tokens, their results rewards, faults sentences."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, cast

import anyio
import httpx2
import numpy as np
import openai
import pytest

from oppo.agents import Agents
from oppo.agents.requests import BODY
from oppo.environments import EnvironmentFailure, Tools
from oppo.errors import ConfigError, DataError
from oppo.events import Drop, Prompt, ToolTokens
from oppo.hf.chat import ChatFormat, chatting
from oppo.hf.tokenizer import HfTokenizer
from oppo.hf.tool_calls import tool_schema
from oppo.models import SamplingSettings
from oppo.observe import WorkContext, working_for
from oppo.rewards import ByTurn, TokenRewards
from oppo.testing import run_virtual
from oppo.turns import Answer, Turn
from oppo.vllm.sync import free_port
from tests.hf.spot_tokenizers import byte_tokenizer
from tests.kit.turns import END, TEMPLATE, Said, call

Act = Callable[[openai.AsyncOpenAI, dict[str, object]], Awaitable[object]]


def add(left: int, right: int = 1) -> int:
    """Add two numbers.

    Args:
        left: the first.
        right: the second.
    """
    return left + right


def shout(text: str) -> str:
    """Say it louder.

    Args:
        text: what to say.
    """
    return text.upper()


SCHEMAS: Any = [tool_schema(add), tool_schema(shout)]
ASK: Any = [{"role": "system", "content": "Count."}, {"role": "user", "content": "2 + 3, loudly?"}]


@cache
def tokenizer() -> HfTokenizer:
    return chatting(byte_tokenizer(special=(END, "<|im_start|>")), template=TEMPLATE)


@cache
def chat() -> ChatFormat:
    return ChatFormat(chatting(tokenizer(), tools=SCHEMAS), ("user", "tool"))


def client(agents: Agents, key: str, **options: Any) -> openai.AsyncOpenAI:
    transport = httpx2.ASGITransport(agents.app)
    made = openai.AsyncOpenAI(
        base_url="http://agents/v1", api_key=key, http_client=httpx2.AsyncClient(transport=transport), **options
    )
    made._platform = "Linux"  # which it would ask for in a thread
    return made


async def ask(to: openai.AsyncOpenAI, messages: Any, **fields: Any) -> Any:
    return await to.chat.completions.create(**{"model": "any", "messages": messages, **fields})


async def with_tools(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
    """Call tools as long as the policy asks for them, as agents do."""
    messages = list(ASK)
    while True:
        reply = (await ask(to, messages, tools=SCHEMAS)).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return float(str(row["gold"]) in reply.content)
        for each in reply.tool_calls:
            tool = {"add": add, "shout": shout}[each.function.name]
            result: Any = tool(**json.loads(each.function.arguments))  # type: ignore[operator]
            content = result if isinstance(result, str) else json.dumps(result)
            messages.append({"role": "tool", "tool_call_id": each.id, "content": content})


class Rollout(Said):
    """One rollout of agents, whose turns a test says."""

    def __init__(self, agents: Agents, prompt: Prompt, *begun: Any) -> None:
        super().__init__(agents, prompt, tokenizer(), *begun)
        self.agents = agents


def rows(*gold: int) -> list[Prompt]:
    return [Prompt(at, at, np.array([0], np.int32), columns={"gold": each}) for at, each in enumerate(gold)]


@asynccontextmanager
async def acting(act: Act, single: str | None = None, **options: Any) -> AsyncIterator[Agents]:
    """Open agents that do this."""

    async def run(row: dict[str, object], base_url: str, key: str) -> object:
        async with client(agents, key, _strict_response_validation=True) as to:
            return await act(to, row)

    agents = Agents(run, tokenizer(), **options)
    async with agents:
        if single is not None:
            agents.single = single
        yield agents


def tried(act: Act, then: Callable[[Rollout], Awaitable[Any]], **options: Any) -> Any:
    """Return what comes of a rollout of an agent that does this."""

    async def main() -> Any:
        async with acting(act, **options) as agents:
            return await then(Rollout(agents, await anext(agents.prompts(rows(5), max_prompt_tokens=2000))))

    return run_virtual(main)


async def conversing(rollout: Rollout, said: Iterator[str], seconds: float = 0.0) -> list[Rollout]:
    """Say these in all conversations of an agent, as each is asked, until it ends; return them, the first first."""
    agents, found = rollout.agents, [rollout]

    async def talk(in_one: Rollout) -> None:
        answer: object = Answer(np.array([], np.int32))
        while isinstance(answer, Answer):
            await anyio.sleep(seconds)
            answer = await in_one.say(next(said))

    async with anyio.create_task_group() as beginning, anyio.create_task_group() as talking:

        async def begin() -> None:
            while True:
                found.append(Rollout(agents, await agents.branch(lambda _: True)))
                talking.start_soon(talk, found[-1])

        beginning.start_soon(begin)
        await talk(rollout)
        beginning.cancel_scope.cancel()
    return found


TURNS = (call("add", left=2, right=3) + "\n" + call("shout", text="five"), "It is 5!")


async def played(rollout: Rollout) -> tuple[Rollout, float | Drop]:
    for said in TURNS:
        answer = await rollout.say(said)
    assert answer is None
    return rollout, await rollout.reward()


def test_one_conversation_has_the_tokens_that_it_has_with_tools() -> None:
    rollout, reward = tried(with_tools, played)
    assert reward == 1.0
    assert rollout.prompt.tokens.tolist() == chatting(tokenizer(), tools=SCHEMAS).encode_chat(ASK)
    first, given, _ = rollout.pieces
    answer = run_virtual(Tools([add, shout], chat()).answer, Turn(rollout.prompt, 0, first.tokens))
    assert isinstance(answer, Answer)
    assert given.tokens.tolist() == answer.tokens.tolist()
    assert isinstance(given, ToolTokens)
    assert answer.calls == 2
    assert (
        rollout.text() == TURNS[0] + "<|im_end|>\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n"
        "<tool_response>\nFIVE\n</tool_response><|im_end|>\n<|im_start|>assistant\nIt is 5!<|im_end|>"
    )


async def rewarding(to: openai.AsyncOpenAI, row: dict[str, object]) -> object:
    return ByTurn([0.25, await with_tools(to, row)])


async def rewarding_more(to: openai.AsyncOpenAI, row: dict[str, object]) -> object:
    return ByTurn([0.25, await with_tools(to, row), 9.0])


def test_an_agent_rewards_the_turns_of_its_conversation_and_none_that_is_not_there() -> None:
    rollout, reward = tried(rewarding, played)
    assert isinstance(reward, TokenRewards)
    first = len(rollout.pieces[0].tokens)
    assert (reward, reward.rewards[first - 1], reward.rewards[-1]) == (1.25, 0.25, 1.0)
    with pytest.raises(
        EnvironmentFailure, match="do not fit its first conversation: there is no turn 2 in a response of"
    ):
        tried(rewarding_more, played)
    assert isinstance(tried(rewarding_more, played, on_failure="drop")[1], Drop)


def test_a_conversation_goes_on_with_another_agent_that_is_told_its_turns() -> None:
    async def main() -> list[object]:
        async with acting(with_tools) as before:
            begun = Rollout(before, await anext(before.prompts(rows(5), max_prompt_tokens=2000)))
            await begun.say(TURNS[0])
        found: list[object] = []
        async with acting(with_tools) as after:
            resumed = Rollout(after, begun.prompt, [*begun.pieces], begun.state, begun.number)
            found += [await resumed.say(TURNS[1]), await resumed.reward()]
        async with acting(with_tools) as third:
            found += [await Rollout(third, begun.prompt, resumed.pieces, None, 0, begun.answered).reward()]
        return found

    assert run_virtual(main) == [None, 1.0, 1.0]


async def random_agent(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
    """Say something else each time."""
    random_agent.count += 1  # type: ignore[attr-defined]
    count = random_agent.count  # type: ignore[attr-defined]
    first = [{"role": "user", "content": f"{row['first'] or count}"}]
    reply = (await ask(to, first)).choices[0].message.content
    await ask(to, [*first, {"role": "assistant", "content": reply}, {"role": "user", "content": f"{count}"}])
    return 0.0


@pytest.mark.parametrize(
    ("first", "words"),
    [
        (
            "",
            r"began with a prompt of \d+ tokens, which differs at token \d+ from that of \d+ of its row: expected the",
        ),
        ("always", "said something else than before the run was resumed, after the same turns"),
    ],
)
def test_an_agent_that_does_otherwise_when_it_is_run_anew_loses_its_rollout_alone(first: str, words: str) -> None:
    async def main() -> Answer | Drop | None:
        async with acting(random_agent, on_failure="fail") as agents:
            prompt = Prompt(0, 0, np.array([0], np.int32), columns={"first": first})
            begun = Rollout(agents, await anext(agents.prompts([prompt])))
            assert isinstance(await begun.say("Hm."), Answer)
            agents.close(begun.prompt)
            return await begun.say("So?")

    random_agent.count = 0  # type: ignore[attr-defined]
    dropped = run_virtual(main)
    assert isinstance(dropped, Drop)
    assert re.search(words, dropped.reason)


def test_a_response_without_room_ends_the_agent_with_its_reward_or_its_rollout() -> None:
    seen: list[tuple[str, str]] = []

    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        messages: Any = [{"role": "user", "content": "Go on."}]
        try:
            while True:
                choice = (await ask(to, messages)).choices[0]
                seen.append((choice.message.content, choice.finish_reason))
                messages += [choice.message.model_dump(exclude_none=True), {"role": "user", "content": "More."}]
        except openai.BadRequestError as error:
            if row["gold"] == 6:
                raise
            seen.append((str(error.code), ""))
            return 0.25

    async def main(*, in_turn: bool, gold: int) -> float | Drop:
        async with acting(act, on_failure="fail") as agents:
            rollout = Rollout(agents, await anext(agents.prompts(rows(gold), max_prompt_tokens=2000)))
            await rollout.say("Yes.")
            if in_turn:
                rollout.write("It went")
            else:
                rollout.pieces.pop()  # the answer had no room
            return await rollout.reward("length")

    assert run_virtual(lambda: main(in_turn=True, gold=5)) == 0.25
    assert run_virtual(lambda: main(in_turn=False, gold=5)) == 0.25
    full = ("context_length_exceeded", "")
    assert seen == [("Yes.", "stop"), ("It went", "length"), full, ("Yes.", "stop"), full]
    dropped = run_virtual(lambda: main(in_turn=True, gold=6))
    assert isinstance(dropped, Drop)
    assert "the response had no room for more, and agent 'run' raised BadRequestError" in dropped.reason


async def silent(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
    return 1.0


async def hanging(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
    await anyio.sleep_forever()
    return 1.0


async def broken(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
    raise OSError("no network")


async def showing(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
    await ask(to, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}])
    return 1.0


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (
            silent,
            "agent 'run' returned 1.0 (float) without a request of the policy: expected it to POST to /chat",
        ),
        (hanging, "agent 'run' neither asked for anything nor returned within 9 s: raise the timeout"),
        (broken, "agent 'run' raised OSError: no network at "),
        (showing, "message 0 shows 'image_url' (str), and the policy reads text only"),
    ],
)
def test_an_agent_without_a_first_request_ends_the_run_or_its_row_is_left_out(
    act: Act, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def nothing(rollout: Rollout) -> None:
        raise AssertionError

    with pytest.raises(EnvironmentFailure) as failed:
        tried(act, nothing, timeout=9)
    assert words in str(failed.value)

    async def main() -> list[Prompt]:
        async def some(to: openai.AsyncOpenAI, row: dict[str, object]) -> object:
            return await (act if row["gold"] == 1 else with_tools)(to, row)

        async with acting(some, timeout=9, on_failure="drop") as agents:
            return [prompt async for prompt in agents.prompts(rows(0, 1, 2), max_prompt_tokens=2000)]

    assert [prompt.admission for prompt in run_virtual(main)] == [0, 2]


async def hanging_later(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
    await ask(to, ASK)
    return await hanging(to, row)


async def broken_later(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
    await ask(to, ASK)
    return await broken(to, row)


async def no_number(to: openai.AsyncOpenAI, row: dict[str, object]) -> object:
    await ask(to, ASK)
    return "good"


async def in_background(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ask, to, ASK)
        tasks.start_soon(ask, to, [*ASK, *ASK])
    return 1.0


async def at_sea(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
    await ask(to, ASK)
    await ask(to, ASK[1:])
    return 1.0


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (hanging_later, "neither asked for anything nor returned within 9 s"),
        (broken_later, "raised OSError: no network"),
        (no_number, "must return a finite number, the reward, or a ByTurn or a Drop; got 'good' (str)"),
        (in_background, "a request of this key is unanswered, and another came"),
        (at_sea, "message 0.role was 'system' (str), and now is 'user' (str); expected the messages of the request"),
    ],
)
def test_a_failure_after_a_turn_ends_the_run_or_drops_the_rollout(act: Act, words: str) -> None:
    async def once(rollout: Rollout) -> Answer | Drop | None:
        return await rollout.say("Hm.")

    with pytest.raises(EnvironmentFailure) as failed:
        tried(act, once, timeout=9)
    assert words in str(failed.value)
    dropped = tried(act, once, timeout=9, on_failure="drop")
    assert isinstance(dropped, Drop)
    assert words in dropped.reason


def test_a_drop_of_an_agent_drops_its_rollout() -> None:
    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> Drop:
        await ask(to, ASK)
        return Drop.because("no such file")

    dropped = tried(act, lambda rollout: rollout.say("Hm."))
    assert (dropped.rollout, dropped.reason) == (0, "no such file")


def said_before(**fields: object) -> dict[str, object]:
    return {"role": "assistant", "content": "", **fields}


def calling(arguments: str) -> dict[str, object]:
    function = {"name": "add", "arguments": arguments}
    return said_before(tool_calls=[{"id": "a", "type": "function", "function": function}])


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.3}, "temperature = 0.3: the run samples with temperature = 0.7, and trains nothing else"),
        ({"n": 2}, "n = 2: the run samples with n = 1"),
        ({"stop": ["End.", "\n"]}, "the run samples with stop = ['End.'], and trains nothing else: leave stop out"),
        ({"logit_bias": {"5": 1}}, "leave logit_bias out"),
        ({"seed": 5}, "'seed' is no field that the policy's endpoint reads: leave it out"),
        ({"max_tokens": 0}, "max_tokens = 0: expected a number of tokens, 1 or more: leave max_tokens out"),
        ({"tool_choice": "required", "tools": SCHEMAS}, "tool_choice = 'required': a call that is forced is sampled"),
        (
            {"thinking_token_budget": 9, "max_tokens": 9},
            "a budget of 9 tokens of thinking in a turn of 9: expected fewer",
        ),
        ({"thinking_token_budget": 9}, "ends thinking with no token of its own"),
        ({"tools": [{"name": "add"}]}, "expected tools as"),
        (
            {"tools": [{"type": "function", "function": {"name": "add", "parameters": {"properties": {"left": 1}}}}]},
            "tool 'add': expected a JSON schema of 'left', got 1",
        ),
        ({"messages": []}, "expected a JSON object with 'messages', which are not empty"),
        ({"messages": [{"role": "critic", "content": "no"}]}, "message 0: expected one of role system, developer"),
        ({"messages": [{"role": "assistant", "content": "I"}]}, "the last message is the assistant's"),
        ({"messages": [calling("[" * 9999), *ASK]}, "message 0 has a call that cannot be read: RecursionError"),
        ({"user": "a" * BODY}, f"the request has more than {BODY} bytes"),
        ({"a" * 10_000: 1}, f"'{'a' * 199}... (10002 characters) is no field"),
        ({"stop": "a" * 10_000}, f"stop = '{'a' * 199}... (10002 characters): the run samples"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_be_trained_is_refused_and_the_agent_may_ask_otherwise(fields: dict[str, Any], words: str) -> None:
    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        with pytest.raises((openai.BadRequestError, openai.APIStatusError)) as refused:
            await to.post("/chat/completions", body={"messages": ASK, **fields}, cast_to=object)
        assert words in refused.value.message
        assert len(refused.value.message) < 1000
        assert refused.value.type == "invalid_request_error"
        await ask(to, ASK, temperature=0.7, max_completion_tokens=128, stop=[])
        return 1.0

    async def once(rollout: Rollout) -> tuple[object, object]:
        return await rollout.say("Hm."), rollout.agents.samples()

    answer, samples = tried(act, once, sampling=SamplingSettings(temperature=0.7, stop_strings=("End.",)))
    assert answer is None
    assert samples == {"agents/refused": [1.0, 0.0], "agents/repeated": [0.0, 0.0]}


@pytest.mark.parametrize(
    ("stop", "said", "shown"),
    [
        ("Observation:", "Look.\nObservation:", "Look."),
        ("\nObservation:", "Look.\nObservation:", "Look."),
        ("\nObservation:", "\nObservation:", ""),
        ("\n\n", "5\n\n", "5"),
        ("Observation:", "<think>\nLook.\nObservation:", "Look."),
        ("</tool_call>", call("add", left=2), "add"),
        ("</tool_call>", "<tool_call>\nadd</tool_call>", "<tool_call>\nadd"),
        ("5", "5 is it.<|im_end|>", "5 is it."),
        ("Observation: 5", "Observation: 4<|im_end|>", "Observation: 4"),
    ],
)
def test_an_answer_leaves_out_the_stop_string_that_ended_it_and_the_conversation_goes_on_with_its_tokens(
    stop: str, said: str, shown: str
) -> None:
    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        reply = await ask(to, ASK, tools=SCHEMAS, stop=stop, extra_body={"return_token_ids": True})
        message = reply.choices[0].message
        called = message.tool_calls[0].function.name if message.tool_calls else ""
        assert (called or message.content or getattr(message, "reasoning_content", "")) == shown
        assert tokenizer().decode_whole(reply.choices[0].token_ids) == said
        following = {"role": "user", "content": "Observation: 42"}
        if called:
            following = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "42"}
        await ask(to, [*ASK, message.model_dump(exclude_none=True), following], tools=SCHEMAS, stop=["End.", stop])
        return 1.0

    async def twice(rollout: Rollout) -> object:
        assert isinstance(await rollout.say(said, end=""), Answer)
        return await rollout.say("So 42.")

    assert tried(act, twice, sampling=SamplingSettings(stop_strings=(stop, "End."))) is None


def renamed(messages: Any) -> Any:
    return json.loads(re.sub(r'"((?:tool_call_)?id)": "\w+"', r'"\1": "own"', json.dumps(messages)))


def with_first(message: Any) -> Callable[[Any], Any]:
    return lambda messages: [message, *messages[1:]]


SHOT = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


@pytest.mark.parametrize(
    ("change", "tools", "counted", "words"),
    [
        (lambda messages: messages, SCHEMAS, (1, 0), ""),
        (lambda messages: [*ASK[:1], *SHOT, ASK[1]], SCHEMAS, (2, 0), ""),
        (lambda messages: [*messages[:2]], SCHEMAS, (2, 0), ""),
        (lambda messages: [{"role": "user", "content": "It was 5. So?"}], SCHEMAS, (2, 0), ""),
        (renamed, SCHEMAS, (2, 1), "message 2.tool_calls[0].id was '"),
        (with_first({"role": "system", "content": "It is 9:01."}), SCHEMAS, (2, 1), "message 0.content was 'Count.'"),
        (lambda messages: messages[1:], SCHEMAS, (2, 1), "message 0.role was 'system' (str), and now is 'user'"),
        (lambda messages: [*messages[:2], {**messages[2], "content": "So"}, messages[3]], SCHEMAS, (2, 1), "is 'So'"),
        (lambda messages: messages, SCHEMAS[:1], (2, 1), "tools was [{"),
    ],
)
def test_conversations_are_counted_and_of_histories_that_change_the_first_difference_is_said(
    change: Callable[[Any], Any], tools: Any, counted: tuple[int, int], words: str, messages: list[str]
) -> None:
    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        said = (await ask(to, ASK, tools=SCHEMAS)).choices[0].message.model_dump(exclude_none=True)
        history = [*ASK, said, {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "5"}]
        await ask(to, change(history), tools=tools)
        return 1.0

    async def whole(rollout: Rollout) -> Mapping[str, Sequence[float]]:
        texts = iter([call("add", left=2, right=3), "It is 5!"])
        assert [await each.reward() for each in await conversing(rollout, texts)] == [1.0] * counted[0]
        return rollout.agents.samples()

    samples = tried(act, whole, single="")
    assert samples["agents/conversations"] == [counted[0]]
    assert samples["agents/history_changed"] == [counted[1]]
    assert len(messages) == counted[1]
    assert words in "".join(messages)


def test_what_is_known_only_after_an_evaluation_was_measured_is_not_counted_in_the_next() -> None:
    async def main() -> list[Mapping[str, Sequence[float]]]:
        found = []
        async with acting(with_tools) as agents:
            for step in (1, 2):
                with working_for(WorkContext(step, "evaluate")):
                    begun = Rollout(agents, await anext(agents.prompts(rows(5), max_prompt_tokens=2000)))
                    for said in TURNS:
                        await begun.say(said)
                    found.append(agents.samples())
                    await begun.reward()  # closes the agent, whose conversations are known then
            return [*found, agents.samples()]

    of_one = {"agents/refused": [0.0, 0.0], "agents/repeated": [0.0, 0.0]}
    assert run_virtual(main) == [of_one, of_one, {}]


def test_an_answer_has_token_ids_if_asked_and_text_as_the_template_reads_it() -> None:
    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        reply = await ask(to, ASK, tools=SCHEMAS, extra_body={"return_token_ids": True})
        assert tokenizer().decode_whole(reply.choices[0].token_ids) == "<think>\nfive\n</think>\n5<|im_end|>"
        message = reply.choices[0].message
        assert (message.content, message.reasoning_content, message.tool_calls) == ("5", "five", None)
        assert reply.usage.completion_tokens == len(reply.choices[0].token_ids)
        assert reply.usage.prompt_tokens == len(reply.prompt_token_ids)
        said = {"role": "assistant", "content": "5", "refusal": None}
        reply = await ask(
            to, [*ASK, said, {"role": "user", "content": [{"type": "text", "text": "Sure?"}]}], tools=SCHEMAS
        )
        assert reply.choices[0].message.content == "<tool_call>\n{no call}\n</tool_call>"
        assert (await to.models.list()).data[0].id == "policy"
        return 1.0

    async def twice(rollout: Rollout) -> object:
        assert isinstance(await rollout.say("<think>\nfive\n</think>\n5"), Answer)
        return await rollout.say("<tool_call>\n{no call}\n</tool_call>")

    assert tried(act, twice) is None


def test_an_answer_has_the_log_probs_of_the_behaviour_policy_if_asked() -> None:
    seen: list[Any] = []

    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        reply = await ask(to, ASK, tools=SCHEMAS, logprobs=True, top_logprobs=0)
        seen.append(reply.choices[0].logprobs.content)
        messages = [*ASK, reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": "So?"}]
        stream = await ask(to, messages, tools=SCHEMAS, logprobs=True, stream=True)
        (shown,) = [each.choices[0].logprobs async for each in stream if each.choices[0].logprobs]
        seen.append(shown.content)
        return 1.0

    async def twice(rollout: Rollout) -> Rollout:
        assert isinstance(await rollout.say("Fünf"), Answer)
        rollout.agents.close(rollout.prompt)  # as a resume does
        assert await rollout.say("5") is None
        return rollout

    rollout = tried(act, twice)
    before, first, second = seen
    assert before == first
    for said, piece in zip((first, second), rollout.pieces[::2], strict=True):
        assert [each.logprob for each in said] == piece.logprobs.tolist()
        assert all(each.top_logprobs == [] for each in said)
    assert [(each.token, each.bytes) for each in first[:3]] == [("F", [70]), ("\ufffd", None), ("\ufffd", None)]
    assert (first[-1].token, second[0].token) == ("<|im_end|>", "5")


def test_a_wrong_key_or_path_is_refused() -> None:
    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        own, to.api_key = to.api_key, "oppo-guess"
        with pytest.raises(openai.AuthenticationError, match="expected the key that the agent was given"):
            await ask(to, ASK)
        with pytest.raises(openai.AuthenticationError):
            await to.models.list()
        to.api_key = own
        with pytest.raises(openai.NotFoundError, match="nothing is served at /v1/embeddings: ask by POST to /v1/chat"):
            await to.embeddings.create(model="any", input="Hello")
        await ask(to, ASK)
        return 1.0

    assert tried(act, lambda rollout: rollout.say("Hm.")) is None


def test_prompts_that_are_too_long_are_left_out_or_an_error() -> None:
    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        await ask(to, [{"role": "user", "content": "x" * int(str(row["gold"]))}])
        return 1.0

    async def main(over_long: Any, longest: int) -> list[int]:
        async with acting(act) as agents:
            return [len(each.tokens) async for each in agents.prompts(rows(9, longest, 19), over_long=over_long)]

    one, two, three = run_virtual(main, "filter", 99)
    assert two > three
    assert run_virtual(main, "filter", 999) == [one, three]
    with pytest.raises(DataError, match="shorten its messages, or raise max_prompt_tokens"):
        run_virtual(main, "error", 999)


def test_a_tokenizer_without_a_chat_template_or_an_agent_that_takes_no_key_is_refused() -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        Agents(lambda row, url, key: 1.0, byte_tokenizer())
    with pytest.raises(ConfigError, match="'<lambda>' is called with a row, a URL and a key: too many positional"):
        Agents(cast("Any", lambda row, url: 1.0), tokenizer())


def sync_agent(row: dict[str, object], base_url: str, key: str) -> float:
    with openai.OpenAI(base_url=base_url, api_key=key) as to:
        reply = to.chat.completions.create(model="any", messages=ASK)
        return float(reply.choices[0].message.content == "Hm.")


async def async_agent(row: dict[str, object], base_url: str, key: str) -> float:
    async with openai.AsyncOpenAI(base_url=base_url, api_key=key) as to:
        reply = await ask(to, ASK)
        return float(reply.choices[0].message.content == "Hm.")


@pytest.mark.parametrize("run", [sync_agent, async_agent])
async def test_a_client_in_a_thread_or_on_the_loop_is_served_over_http(run: Any) -> None:
    agents = Agents(run, tokenizer(), timeout=60)
    for _ in range(2):
        async with agents, agents:
            rollout = Rollout(agents, await anext(agents.prompts(rows(5))))
            assert await rollout.say("Hm.") is None
            assert await rollout.reward() == 1.0
            left = Rollout(agents, await anext(agents.prompts(rows(7))))
    assert len(left.prompt.tokens) > 10


@pytest.mark.parametrize(
    ("host", "public", "told"),
    [
        ("0.0.0.0", "", "http://127.0.0.1:{port}/v1"),
        ("::1", "", "http://[::1]:{port}/v1"),
        ("::", "", "http://[::1]:{port}/v1"),
        ("0.0.0.0", "http://localhost:{port}/v1/", "http://localhost:{port}/v1/"),
    ],
)
async def test_agents_are_told_an_address_at_which_they_reach_the_server(host: str, public: str, told: str) -> None:
    port, seen = free_port(), list[str]()

    def run(row: dict[str, object], base_url: str, key: str) -> float:
        seen.append(base_url)
        return sync_agent(row, base_url, key)

    async with Agents(run, tokenizer(), host=host, port=port, public_url=public.format(port=port)) as agents:
        rollout = Rollout(agents, await anext(agents.prompts(rows(5))))
        assert await rollout.say("Hm.") is None
        assert await rollout.reward() == 1.0
    assert seen == [told.format(port=port)]


async def test_a_port_that_is_taken_is_named() -> None:
    async with Agents(async_agent, tokenizer()) as first:
        port = int(first._server.url.split(":")[2].removesuffix("/v1"))
        with pytest.raises(ConfigError, match=f"agents cannot be served at 127.0.0.1:{port}"):
            async with Agents(async_agent, tokenizer(), port=port):
                raise AssertionError


async def test_a_long_history_is_tokenized_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads, encode = dict[int, bool](), HfTokenizer.encode_chat

    def encoding(self: HfTokenizer, messages: Any, **options: Any) -> list[int]:
        threads[len(messages[0]["content"])] = threading.current_thread() is not threading.main_thread()
        return encode(self, messages, **options)

    async def act(to: openai.AsyncOpenAI, row: dict[str, object]) -> float:
        await ask(to, [{"role": "user", "content": "a" * int(str(row["gold"]))}])
        return 1.0

    async with acting(act) as agents:
        monkeypatch.setattr(HfTokenizer, "encode_chat", encoding)
        found = [len(prompt.tokens) async for prompt in agents.prompts(rows(9, 30_000), max_prompt_tokens=40_000)]
    assert threads == {9: False, 30_000: True}
    assert found[1] - found[0] == 30_000 - 9
