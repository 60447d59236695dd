"""The official clients of three APIs, by which one agent program speaks."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import anthropic
import httpx2
import openai

from oppo.agents import Agents


class Reply(NamedTuple):
    """An answer, however its API words it."""

    text: str
    reasoning: str
    calls: list[tuple[str, str, str]]  # id, name, arguments
    cut: bool
    usage: tuple[int, int]


@dataclass
class Speaker:
    """A conversation in one API's own form.

    Attributes:
        tools: schemas, as of chat completions.
        fields: more of each request.
        heard: called with each event of a stream.
    """

    client: Any
    tools: list[Any] = field(default_factory=list)
    stream: bool = False
    fields: Mapping[str, Any] = field(default_factory=dict)
    heard: Callable[[Any], None] = lambda event: None
    history: list[Any] = field(default_factory=list)
    system: str = ""

    async def ask(self, text: str) -> Reply:
        self.history.append({"role": "user", "content": text})
        return await self.send()

    async def answer(self, results: Mapping[str, str]) -> Reply:
        raise NotImplementedError

    async def send(self) -> Reply:
        raise NotImplementedError


class Chat(Speaker):
    async def send(self) -> Reply:
        system = [{"role": "system", "content": self.system}] if self.system else []
        asked = {"model": "any", "messages": [*system, *self.history], **self.fields}
        asked |= {"tools": self.tools} if self.tools else {}
        if self.stream:
            usage = {"include_usage": True}
            try:
                async with self.client.chat.completions.stream(**asked, stream_options=usage) as stream:
                    async for event in stream:
                        self.heard(event)
                    reply = await stream.get_final_completion()
            except openai.LengthFinishReasonError as error:
                reply = error.completion
        else:
            reply = await self.client.chat.completions.create(**asked)
        message = reply.choices[0].message
        self.history.append(message.model_dump(exclude_none=True, exclude={"parsed"}))
        for each in self.history[-1].get("tool_calls", ()):
            each["function"].pop("parsed_arguments", None)
        return Reply(
            message.content or "",
            getattr(message, "reasoning_content", ""),
            [(each.id, each.function.name, each.function.arguments) for each in message.tool_calls or ()],
            reply.choices[0].finish_reason == "length",
            (reply.usage.prompt_tokens, reply.usage.completion_tokens),
        )

    async def answer(self, results: Mapping[str, str]) -> Reply:
        self.history += [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in results.items()]
        return await self.send()


class Responses(Speaker):
    async def send(self) -> Reply:
        system = {"instructions": self.system} if self.system else {}
        asked = {"model": "any", "input": self.history, **system, **self.fields}
        asked |= {"tools": [{"type": "function", **each["function"]} for each in self.tools]} if self.tools else {}
        if not self.stream:
            reply = await self.client.responses.create(**asked)
        elif self.fields:  # the helper raises for an answer that is cut
            async for event in await self.client.responses.create(**asked, stream=True):
                self.heard(event)
                reply = getattr(event, "response", None)
        else:
            async with self.client.responses.stream(**asked) as stream:
                async for event in stream:
                    self.heard(event)
                reply = await stream.get_final_response()
        assert reply.object == "response"
        assert reply.usage.total_tokens == reply.usage.input_tokens + reply.usage.output_tokens
        self.history += [json.loads(each.to_json(exclude_unset=False)) for each in reply.output]
        for each in self.history:
            each.pop("parsed_arguments", None)
        return Reply(
            reply.output_text,
            "".join(each.content[0].text for each in reply.output if each.type == "reasoning"),
            [(each.call_id, each.name, each.arguments) for each in reply.output if each.type == "function_call"],
            reply.status == "incomplete" and reply.incomplete_details.reason == "max_output_tokens",
            (reply.usage.input_tokens, reply.usage.output_tokens),
        )

    async def answer(self, results: Mapping[str, str]) -> Reply:
        self.history += [
            {"type": "function_call_output", "call_id": id_, "output": text} for id_, text in results.items()
        ]
        return await self.send()


class Messages(Speaker):
    async def send(self) -> Reply:
        system = {"system": self.system} if self.system else {}
        asked = {"model": "any", "messages": self.history, "max_tokens": 1024, **system, **self.fields}
        functions = [each["function"] for each in self.tools]
        if functions:
            asked["tools"] = [
                {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
                for each in functions
            ]
        if self.stream:
            async with self.client.messages.stream(**asked) as stream:
                async for event in stream:
                    self.heard(event)
                reply = await stream.get_final_message()
        else:
            reply = await self.client.messages.create(**asked)
        blocks = reply.content
        self.history.append({"role": "assistant", "content": [each.to_dict() for each in blocks]})
        calls = [(each.id, each.name, json.dumps(each.input)) for each in blocks if each.type == "tool_use"]
        assert reply.stop_reason in ("tool_use" if calls else "end_turn", "max_tokens")
        return Reply(
            "".join(each.text for each in blocks if each.type == "text"),
            "".join(each.thinking for each in blocks if each.type == "thinking"),
            calls,
            reply.stop_reason == "max_tokens",
            (reply.usage.input_tokens, reply.usage.output_tokens),
        )

    async def answer(self, results: Mapping[str, str]) -> Reply:
        content = [{"type": "tool_result", "tool_use_id": id_, "content": text} for id_, text in results.items()]
        self.history.append({"role": "user", "content": content})
        return await self.send()


APIS: Mapping[str, type[Speaker]] = {"chat": Chat, "responses": Responses, "messages": Messages}


def client_of(api: str, agents: Agents | None, url: str, key: str, **options: Any) -> Any:
    """Return an official client of this API; of agents it asks the application itself."""
    if agents is not None:
        options["http_client"] = httpx2.AsyncClient(transport=httpx2.ASGITransport(agents.app))
    if api == "messages":
        made: Any = anthropic.AsyncAnthropic(base_url=url.removesuffix("/v1"), api_key=key, **options)
    else:
        made = openai.AsyncOpenAI(base_url=url, api_key=key, **options)
    made._platform = "Linux"  # which it would ask for in a thread
    return made
