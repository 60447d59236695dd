"""Requests as OpenAI's clients send them: read within bounds, and refused where the run samples otherwise."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypeVar, cast

import anyio

from oppo.errors import ConfigError, one_line, running_loop, shortened, shown
from oppo.events import IntArray
from oppo.models import SamplingSettings

if TYPE_CHECKING:
    from oppo.hf.chat import ChatFormat
    from oppo.hf.tokenizer import HfTokenizer

T = TypeVar("T")

Json: TypeAlias = dict[str, Any]

MODEL: Final = "policy"
"""The name of the model that agents are served; they may ask for any."""

FORMATS: Final = 64
"""Sets of tools whose chat formats are kept."""

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_UNREAD: Final = frozenset({"model", "user", "metadata", "safety_identifier", "prompt_cache_key", "store"})
_READ: Final = frozenset(
    {"messages", "tools", "return_token_ids", "max_tokens", "max_completion_tokens", "stream", "stream_options"}
)

BODY: Final = 8 * 2**20
"""The most bytes of a request."""

LONG: Final = 20_000
"""Bytes or characters above which they are processed in a thread."""


class Refusal(Exception):  # noqa: N818 - an answer to an agent
    # An error as OpenAI's servers answer it.
    def __init__(self, message: str, *, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status

    def again(self) -> Refusal:
        # An exception holds the frames of each place that has raised it, so each place raises its own.
        return Refusal(str(self), code=self.code, status=self.status)

    def json(self) -> Json:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": shortened(str(self)), "type": kind, "param": None, "code": self.code}}


@dataclass(slots=True, eq=False)
class Request:
    messages: list[Json]
    tokens: IntArray  # the prompt, or the tokens after the last turn
    answers: int  # messages of tools behind that
    digest: str
    shows_ids: bool
    shows_logprobs: bool
    key: str  # by which its client says what it sends again
    waiting: int = 0  # connections of its client
    heard: bool = False  # by one of these
    reply: Json | Refusal | None = None
    done: anyio.Event = field(default_factory=anyio.Event)

    def settle(self, reply: Json | Refusal) -> None:
        self.reply = reply
        self.done.set()

    async def result(self) -> Json:
        self.waiting += 1
        try:
            await self.done.wait()
            self.heard = True
        finally:
            self.waiting -= 1
        if isinstance(self.reply, Refusal):
            raise self.reply.again()
        assert self.reply is not None  # noqa: S101 - set before the event
        return self.reply


class ChatRequests:
    """Reads requests: what they ask for can be sampled as the run samples, or is refused."""

    def __init__(self, tokenizer: HfTokenizer, sampling: SamplingSettings) -> None:
        self._tokenizer = tokenizer
        self._most = sampling.max_new_tokens
        self._formats: dict[str, tuple[HfTokenizer, ChatFormat]] = {}
        self._stops = sampling.stop_strings
        own = [each for each in getattr(sampling, "stop", ()) if isinstance(each, str)]
        self._fixed: dict[str, tuple[object, ...]] = {
            "stop": ([*self._stops, *own], *self._stops, *own),
            "temperature": (sampling.temperature,),
            "top_p": (sampling.top_p,),
            "top_k": (sampling.top_k, *(() if sampling.top_k else (-1,))),
            "n": (1,),
            "frequency_penalty": (0,),
            "presence_penalty": (0,),
            "repetition_penalty": (1,),
            "logit_bias": ({},),
            "logprobs": (False, True),
            "top_logprobs": (0,),
            "response_format": ({"type": "text"},),
            "parallel_tool_calls": (True,),
            "tool_choice": ("auto",),
        }

    def check(self, body: object) -> Json:
        if not isinstance(body, dict) or not isinstance(body.get("messages"), list) or not body["messages"]:
            raise Refusal("expected a JSON object with a list of messages, as of chat completions")
        for name, value in body.items():
            if value is None or name in _UNREAD or name in _READ or (name == "tool_choice" and not body.get("tools")):
                continue
            if name not in self._fixed:
                raise Refusal(f"{quoted(name)} is no field that the policy's endpoint reads: leave it out")
            asked = value if name == "stop" and isinstance(value, list) else [value]
            if any(each not in self._fixed[name] for each in asked):
                raise Refusal(
                    f"{name} = {quoted(value)}: the run samples with {name} = {self._fixed[name][0]!r}, and trains "
                    f"nothing else: leave {name} out, or change the run's [sampling]",
                    code="unsupported_value",
                )
        for name in ("max_tokens", "max_completion_tokens"):
            most = body.get(name)
            if most is not None and (not isinstance(most, int) or most < self._most):
                raise Refusal(
                    f"{name} = {quoted(most)}: a turn may be as long as its response has room for, "
                    f"sampling.max_new_tokens = {self._most} in all: leave {name} out",
                    code="unsupported_value",
                )
        return body

    def stopped(self, tokenizer: HfTokenizer, turn: list[int]) -> str:
        """Return the end of a turn from the stop string on that its last token has completed; empty if none."""
        if not self._stops:
            return ""
        text, before = tokenizer.decode(turn), tokenizer.decode(turn[:-1])
        found = [
            (at + len(stop), number, at)
            for number, stop in enumerate(self._stops)
            for at in (each.start() for each in re.finditer(f"(?={re.escape(stop)})", text))
            if not before.startswith(stop, at)
        ]
        return text[min(found)[2] :] if found else ""

    def messages(self, body: Json) -> list[Json]:
        found = [_message(each, number) for number, each in enumerate(body["messages"])]
        if found[-1]["role"] == "assistant":
            raise Refusal("the last message is the assistant's: expected one of a user or a tool, to be answered")
        return found

    def format(self, tools: object) -> tuple[HfTokenizer, ChatFormat]:
        from oppo.hf.chat import ChatFormat, chatting  # noqa: PLC0415 - torch takes seconds to import

        for tool in tools if isinstance(tools, list) else [tools]:
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise Refusal(
                    'expected tools as {"type": "function", "function": {"name": ..., "parameters": ...}}, got '
                    f"{shown(tool)}"
                )
        shown_tools, key = cast("list[Json]", tools), digest_of(tools)
        if key not in self._formats:
            try:
                tokenizer = chatting(self._tokenizer, tools=shown_tools, variables=self._tokenizer.variables)
                roles = ("user", "tool") if shown_tools else ("user",)
                try:
                    found = ChatFormat(tokenizer, (*roles, "system"))
                except ConfigError:  # many templates have system messages at the beginning only
                    found = ChatFormat(tokenizer, roles)
                found.parse([])  # which reads the schemas
            except ConfigError as error:
                raise Refusal(str(error)) from error
            except Exception as error:  # any kind: the schemas are the agent's
                raise Refusal(f"the tools cannot be read: {one_line(error)}") from error
            self._formats = {**dict([*self._formats.items()][1 - FORMATS :]), key: (tokenizer, found)}
        return self._formats[key]


def quoted(value: object) -> str:
    return shortened(repr(value), 200)


def _message(value: object, number: int) -> Json:
    role = _ROLES.get(str(value.get("role"))) if isinstance(value, dict) else None
    if role is None or not isinstance(value, dict):
        raise Refusal(f"message {number}: expected one of role {', '.join(_ROLES)}, got {shown(value)}")
    content = value.get("content")
    for part in content if isinstance(content, list) else ():
        if not isinstance(part, dict) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise Refusal(f"message {number} shows {shown(kind)}: the policy reads text only: leave it out")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    if content is not None and not isinstance(content, str):
        raise Refusal(f"message {number}: expected its content to be text, got {shown(content)}")
    found: Json = {"role": role, "content": content or ""}
    found |= {name: value[name] for name in ("name", "tool_call_id", "reasoning_content") if value.get(name)}
    try:
        if value.get("tool_calls"):
            found["tool_calls"] = [_called(each) for each in value["tool_calls"]]
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise Refusal(f"message {number} has a call that cannot be read: {one_line(error)}") from error
    return found


def _called(call: Any) -> Json:
    function = call["function"]
    arguments = function.get("arguments") or {}
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": read}}


async def apart(size: int, work: Callable[[], T]) -> T:
    # Large work in a thread, so that the event loop goes on.
    if size < LONG or getattr(running_loop(), "virtual", False):
        return work()
    return await anyio.to_thread.run_sync(work)


def digest_of(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()
