"""One agent program over chat completions, responses and messages, by the official clients: one conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import anthropic
import anyio
import anyio.lowlevel
import httpx2
import openai
import pytest
from hypothesis import given, strategies as st

from oppo.agents import Agents
from oppo.agents.chat_completions import ChatCompletions
from oppo.agents.messages import Messages
from oppo.agents.requests import ChatRequests, Refusal, Wanted
from oppo.agents.responses import Responses
from oppo.events import Drop
from oppo.hf.chat import ChatFormat, chatting
from oppo.hf.tokenizer import HfTokenizer
from oppo.limits import TurnLimit
from oppo.models import SamplingSettings
from oppo.testing import run_virtual
from oppo.turns import Answer
from tests.agents.speakers import APIS, Reply, Speaker, client_of
from tests.agents.test_agents import SCHEMAS, Rollout, add, rows, shout
from tests.hf.spot_tokenizers import byte_tokenizer
from tests.kit.turns import END, TEMPLATE, call

PROGRAM = Callable[[Speaker, dict[str, object]], Any]
THOUGHT = "<think>\nwell\n</think>\n\n"
TURNS = (THOUGHT + "So: " + call("add", left=2, right=3) + "\n" + call("shout", text="fünf"), "It is 5!")
TOOLS: Any = [
    {**each, "function": {name: value for name, value in each["function"].items() if name != "return"}}
    for each in SCHEMAS
]
LONG = SamplingSettings(max_new_tokens=1024)


@cache
def tokenizer() -> HfTokenizer:
    """Return one that has tokens of its own for the marks of thinking."""
    return chatting(byte_tokenizer(special=(END, "<|im_start|>", "<think>", "</think>")), template=TEMPLATE)


def tried(api: str, program: PROGRAM, then: Callable[[Rollout], Any], *, stream: bool = False, **fields: Any) -> Any:
    """Return what comes of a rollout of an agent that does this over an API."""

    async def run(row: dict[str, object], url: str, key: str) -> float:
        async with client_of(api, agents, url, key) as to:
            return float(await program(APIS[api](to, stream=stream, fields=fields), row))

    agents = Agents(run, tokenizer(), LONG)

    async def main() -> Any:
        async with agents:
            rollout = Rollout(agents, await anext(agents.prompts(rows(5), max_prompt_tokens=2000)))
            rollout.tokenizer = tokenizer()
            return await then(rollout)

    return run_virtual(main)


async def counting(to: Speaker, row: dict[str, object], seen: list[Reply]) -> float:
    to.system, to.tools = "Count.", TOOLS
    seen.append(await to.ask("2 + 3, loudly?"))
    while calls := seen[-1].calls:
        tools: Any = {"add": add, "shout": shout}
        results = {id_: str(tools[name](**json.loads(arguments))) for id_, name, arguments in calls}
        seen.append(await to.answer(results))
    return float(str(row["gold"]) in seen[-1].text)


async def in_parts(rollout: Rollout, text: str, sizes: tuple[int, ...] = (5,), end: str = END) -> Answer | Drop | None:
    """Say a turn of which the endpoint hears so many tokens at a time."""
    tokens, at = tokenizer().encode_whole(text + end), 0
    for size in sizes * (1 + len(tokens)):
        at += size
        heard = tokens[:at]
        rollout.agents.follow(rollout.prompt, rollout.number, heard.copy)
        await anyio.lowlevel.checkpoint()
        if at > len(tokens):
            break
    return await rollout.say(text, end)


def test_one_program_over_three_apis_has_the_same_tokens_masks_ids_and_reward() -> None:
    found = {}
    for api in APIS:
        for stream in (False, True):
            seen: list[Reply] = []

            async def whole(rollout: Rollout) -> list[object]:
                assert isinstance(await in_parts(rollout, TURNS[0]), Answer)
                assert await in_parts(rollout, TURNS[1]) is None
                pieces = [(type(each), each.tokens.tolist()) for each in rollout.pieces]
                return [rollout.prompt.tokens.tolist(), pieces, await rollout.reward(), rollout.agents.samples()]

            found[api, stream] = tried(api, partial(counting, seen=seen), whole, stream=stream), seen
    (first, replies), *others = found.values()
    assert replies[0][:2] == ("So:", "well")
    assert [name for _, name, _ in replies[0].calls] == ["add", "shout"]
    assert first[2:] == [
        1.0,
        {
            "agents/refused": [0.0] * 2,
            "agents/repeated": [0.0] * 2,
            "agents/conversations": [1.0],
            "agents/history_changed": [0.0],
        },
    ]
    assert all(each == (first, replies) for each in others)


TEXTS = st.lists(
    st.sampled_from(
        [
            *("<think>\n", "</think>", "<th", "well", "5", " ", "\n", "é", "<tool_call>", "<", "Stop", "St"),
            *(call("add", left=2), call("shout", text="<think>")),
        ]
    ),
    max_size=7,
).map("".join)


@given(text=TEXTS, sizes=st.lists(st.integers(1, 9), min_size=1, max_size=4), calls=st.booleans(), stop=st.booleans())
def test_what_is_streamed_is_what_is_said_however_the_turn_is_cut(
    text: str, sizes: list[int], calls: bool, stop: bool
) -> None:
    chat = ChatFormat(chatting(tokenizer(), tools=SCHEMAS), ("user", "tool"))
    stops = ["Stop"] if stop else []
    text = text.replace("Stop", "St") + "Stop" if stop else text
    tokens, at = tokenizer().encode_whole(text + ("" if stop else END)), 0
    parsed = chat.parse(tokens)
    last = ("", "")
    content = parsed.text if parsed.malformed or not calls else parsed.content
    said = parsed.reasoning, content
    if stop:
        said = tuple(each.removesuffix("Stop").rstrip() for each in said)  # type: ignore[assignment]
    for size in sizes * (1 + len(tokens)):
        at += size
        now = chat.so_far(tokens[:at], stops, calls=calls)
        assert all(new.startswith(old) for new, old in zip(now, last, strict=True))
        assert all(whole.startswith(new) for whole, new in zip(said, now, strict=True)), (said, now)
        last = now
        if at > len(tokens):
            break


@pytest.mark.parametrize("api", APIS)
async def test_tokens_come_over_http_as_they_are_sampled(api: str) -> None:
    begun, first = anyio.Event(), []

    def heard(event: Any) -> None:
        first.append(event.type)
        if event.type in ("content.delta", "response.output_text.delta", "text"):
            begun.set()

    async def run(row: dict[str, object], url: str, key: str) -> float:
        async with client_of(api, None, url, key) as to:
            reply = await APIS[api](to, stream=True, heard=heard).ask("Hello")
        return float(reply.text == "One, two.")

    agents = Agents(run, tokenizer(), LONG)
    async with agents:
        rollout = Rollout(agents, await anext(agents.prompts(rows(5))))
        rollout.tokenizer = tokenizer()
        with anyio.fail_after(60):
            agents.follow(rollout.prompt, 0, lambda: tokenizer().encode_whole("One,"))
            await begun.wait()  # before the turn has ended
            assert await rollout.say("One, two.") is None
            assert await rollout.reward() == 1.0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", APIS)
def test_a_turn_is_capped_and_the_response_goes_on(api: str, stream: bool) -> None:
    seen: list[Reply] = []
    name = {"responses": "max_output_tokens"}.get(api, "max_tokens")

    async def program(to: Speaker, row: dict[str, object]) -> float:
        seen.append(await to.ask("Hello"))
        to.fields = {name: 3}
        seen.append(await to.ask("More"))
        return 1.0

    async def capped(rollout: Rollout) -> object:
        assert rollout.prompt.limit == TurnLimit(4)
        answer = await rollout.say("Well", end="")
        assert isinstance(answer, Answer)
        assert answer.limit == TurnLimit(3)
        text = tokenizer().decode_whole(answer.tokens.tolist())
        assert text == "<|im_end|>\n<|im_start|>user\nMore<|im_end|>\n<|im_start|>assistant\n"
        return await rollout.say("So", end=END)

    assert tried(api, program, capped, stream=stream, **{name: 4}) is None
    assert [(each.text, each.cut) for each in seen] == [("Well", True), ("So", False)]


@pytest.mark.parametrize("api", APIS)
def test_thinking_beyond_its_budget_is_ended_with_tokens_that_are_not_sampled(api: str) -> None:
    seen: list[Reply] = []
    thinking = {"extra_body": {"thinking_token_budget": 6}}
    fields = {"thinking": {"type": "enabled", "budget_tokens": 6}} if api == "messages" else thinking

    async def program(to: Speaker, row: dict[str, object]) -> float:
        seen.append(await to.ask("Hello"))
        return 1.0

    async def ended(rollout: Rollout) -> object:
        assert rollout.prompt.limit.thinking == 6
        assert not rollout.prompt.limit.interrupts(tokenizer().encode_whole("<think>ab</think>"))
        within = await rollout.say("<think>abcde", end="")
        assert isinstance(within, Answer)
        assert within.within
        assert tokenizer().decode_whole(within.tokens.tolist()) == "\n</think>\n\n"
        rollout.number -= 1
        before = [token for each in rollout.pieces for token in each.tokens.tolist()]
        rollout.pieces.clear()
        rollout.answered.clear()
        return await rollout.say(tokenizer().decode_whole(before) + "5.")

    assert tried(api, program, ended, **fields) is None
    assert (seen[0].text, seen[0].reasoning) == ("5.", "abcde")


@pytest.mark.parametrize("api", APIS)
def test_calls_are_text_where_none_is_asked_for_and_the_prompt_is_the_same(api: str) -> None:
    seen: list[Reply] = []
    none: Any = {"type": "none"} if api == "messages" else "none"

    async def program(to: Speaker, row: dict[str, object]) -> float:
        to.tools = TOOLS
        seen.append(await to.ask("2 + 3?"))
        seen.append(await to.ask("So?"))
        return 1.0

    async def said(rollout: Rollout) -> object:
        assert isinstance(await in_parts(rollout, call("add", left=2)), Answer)
        return rollout.prompt.tokens.tolist(), await rollout.say("5")

    prompt, last = tried(api, program, said, tool_choice=none)
    shown = chatting(tokenizer(), tools=TOOLS).encode_chat([{"role": "user", "content": "2 + 3?"}])
    assert (prompt, last) == (shown, None)
    assert (seen[0].text, seen[0].calls) == (call("add", left=2), [])


REFUSED: dict[str, list[tuple[dict[str, Any], str]]] = {
    "chat": [({"tool_choice": "always", "tools": SCHEMAS}, "tool_choice = 'always': a call that is forced")],
    "responses": [
        ({"max_output_tokens": 0}, "max_output_tokens = 0: expected a number of tokens, 1 or more"),
        ({"reasoning": {"effort": "low"}}, "'reasoning' is no field that the policy's endpoint reads: leave it out"),
        ({"temperature": 0.1}, "temperature = 0.1: the run samples with temperature = 1.0, and trains nothing else"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is the last answer of no conversation"),
        ({"input": [{"type": "computer_call"}]}, "input 0 is 'computer_call' (str): expected a message of role"),
        ({"text": {"format": {"type": "json_object"}}}, "the policy writes text as it is trained: leave it out"),
    ],
    "messages": [
        ({"max_tokens": 0}, "max_tokens = 0: expected a number of tokens, 1 or more"),
        ({"max_tokens": None}, "and max_tokens: of the turn, 1 or more"),
        ({"stop_sequences": ["."]}, "stop_sequences = ['.']: the run samples with stop_sequences = []"),
        ({"tools": [{"name": "a"}]}, "expected tools as {"),
        ({"thinking": {"type": "disabled"}}, "the policy thinks as its chat template has it begin"),
        ({"tool_choice": {"type": "any"}, "tools": [{"name": "a", "input_schema": {}}]}, "a call that is forced"),
        ({"messages": [{"role": "system", "content": "a"}]}, "message 0: expected one of role user or assistant"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            "message 0 shows 'image' (str), and the policy",
        ),
    ],
}


@pytest.mark.parametrize(("api", "body", "words"), [(api, *each) for api, of in REFUSED.items() for each in of])
def test_what_cannot_be_trained_is_refused_in_the_form_of_its_api(api: str, body: dict[str, Any], words: str) -> None:
    async def program(to: Speaker, row: dict[str, object]) -> float:
        asked: Any = {"model": "any", "messages": [{"role": "user", "content": "a"}]}
        if api == "responses":
            asked = {"model": "any", "input": "a"}
        path = {"chat": "/chat/completions", "responses": "/responses", "messages": "/v1/messages"}[api]
        asked |= {"max_tokens": 9} if api == "messages" else {}
        with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)) as refused:
            await to.client.post(path, body={**asked, **body}, cast_to=object)
        error: Any = refused.value
        assert words in error.message
        found: Any = error.response.json()
        inner = found["error"]
        assert inner["type"] == "invalid_request_error"
        assert inner.keys() == ({"type", "message", "code"} if api == "messages" else {*inner, "param", "code"})
        assert found.get("type") == ("error" if api == "messages" else None)
        return float((await to.ask("Hello")).text == "Hm.")

    assert tried(api, program, lambda rollout: rollout.say("Hm.")) is None


def test_a_conversation_goes_on_by_the_api_that_it_began_by_and_by_the_id_of_its_last_answer() -> None:
    async def program(to: Speaker, row: dict[str, object]) -> float:
        to.system = "Count."
        first = await to.client.responses.create(model="any", instructions="Count.", input="2 + 3?")
        url, key = str(to.client.base_url), to.client.api_key
        async with httpx2.AsyncClient(transport=to.client._client._transport) as plain:
            said = [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]
            asked = {"messages": [{"role": "system", "content": "Count."}, *said, {"role": "user", "content": "?"}]}
            refused = await plain.post(f"{url}chat/completions", json=asked, headers={"X-Api-Key": key})
            assert refused.status_code == 400
            assert "that began by POST to /v1/responses goes on there" in refused.json()["error"]["message"]
        second = await to.client.responses.create(model="any", input="Sure?", previous_response_id=first.id)
        return float(second.output_text == "Yes.")

    async def twice(rollout: Rollout) -> object:
        assert isinstance(await rollout.say("5"), Answer)
        assert await rollout.say("Yes.") is None
        return await rollout.reward()

    assert tried("responses", program, twice) == 1.0


@pytest.mark.parametrize("api", APIS)
def test_what_a_client_sends_again_samples_nothing(api: str) -> None:
    async def program(to: Speaker, row: dict[str, object]) -> float:
        replies = [await to.ask("Hello")]
        to.history = to.history[:1]
        to.fields = {"extra_headers": {"x-stainless-retry-count": "1"}}
        replies.append(await to.send())
        return float(replies[0] == replies[1])

    async def once(rollout: Rollout) -> object:
        assert await rollout.say("Hm.") is None
        return await rollout.reward(), rollout.agents.samples()["agents/repeated"]

    assert tried(api, program, once) == (1.0, [0.0, 1.0])


WORDS = st.text(st.sampled_from("ab \n<é"), min_size=1, max_size=5)
ANSWERS = st.tuples(WORDS, st.sampled_from(["", "thought"]), st.lists(st.integers(0, 9), max_size=2))


@given(st.sampled_from(["", "Count."]), WORDS, st.lists(st.tuples(ANSWERS, WORDS), max_size=3))
def test_three_apis_read_one_conversation(system: str, first: str, turns: list[Any]) -> None:
    chat: list[Any] = [{"role": "user", "content": first}]
    items: list[Any] = [*chat]
    messages: list[Any] = [*chat]
    number = 0
    for (text, thought, numbers), following in turns:
        ids = [f"c{(number := number + 1)}" for _ in numbers]
        calls = [("add", json.dumps({"left": each})) for each in numbers]
        named = [{"name": name, "arguments": arguments} for name, arguments in calls]
        chat.append({"role": "assistant", "content": text, "reasoning_content": thought})
        items += [{"type": "reasoning", "content": [{"type": "reasoning_text", "text": thought}]}] if thought else []
        items.append({"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]})
        items += [{"type": "function_call", "call_id": id_, **each} for id_, each in zip(ids, named, strict=True)]
        blocks: list[Any] = [{"type": "thinking", "thinking": thought, "signature": ""}] if thought else []
        blocks.append({"type": "text", "text": text})
        for id_, each in zip(ids, numbers, strict=True):
            blocks.append({"type": "tool_use", "id": id_, "name": "add", "input": {"left": each}})
        messages.append({"role": "assistant", "content": blocks})
        results: list[Any] = []
        for id_, each in zip(ids, named, strict=True):
            chat[-1].setdefault("tool_calls", []).append({"id": id_, "type": "function", "function": each})
        for id_ in ids:
            chat.append({"role": "tool", "tool_call_id": id_, "content": following})
            items.append({"type": "function_call_output", "call_id": id_, "output": following})
            results.append({"type": "tool_result", "tool_use_id": id_, "content": following})
        if not ids:
            chat.append({"role": "user", "content": following})
            items.append(chat[-1])
            results = [{"type": "text", "text": following}]
        messages.append({"role": "user", "content": results})
    told: Any = {"instructions": system} if system else {}
    bodies = [
        (ChatCompletions(), {"messages": [*([{"role": "system", "content": system}] if system else []), *chat]}),
        (Responses(), {"input": items, **told}),
        (Messages(), {"messages": messages, "max_tokens": 5000, **({"system": system} if system else {})}),
    ]
    requests = ChatRequests(tokenizer(), LONG)
    found: list[Wanted] = [api.read(body, requests) for api, body in bodies]
    assert found[0].messages == found[1].messages == found[2].messages
    assert {each.most for each in found} == {0}


def test_an_answer_that_fails_while_it_is_streamed_is_an_error_of_its_api() -> None:
    async def program(to: Speaker, row: dict[str, object]) -> float:
        with pytest.raises((openai.APIError, anthropic.APIStatusError), match="has ended"):
            await to.ask("Hello")
        return 1.0

    async def broken(rollout: Rollout) -> None:
        rollout.agents.follow(rollout.prompt, 0, lambda: tokenizer().encode_whole("Well"))
        await anyio.lowlevel.checkpoint()
        session = rollout.agents._session(rollout.prompt, 0)
        session.first.refuse(Refusal("the rollout of this key has ended"))
        await session.ended()
        assert session.outcome == 1.0

    for api in APIS:
        tried(api, program, broken, stream=True)
