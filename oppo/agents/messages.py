"""Anthropic's messages, as requests and answers of agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from oppo.agents.requests import Api, ChatRequests, Json, Kind, Refusal, Request, Said, Stream, Wanted
from oppo.errors import shortened, shown

_SAMPLING: Final = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "stop_sequences": "stop"}
_READ: Final = (
    "messages system tools tool_choice max_tokens thinking stream return_token_ids model metadata service_tier"
)
_REASONS: Final = {"stop": "end_turn", "tool_calls": "tool_use", "length": "max_tokens"}
_ERRORS: Final = {401: "authentication_error", 404: "not_found_error", 413: "request_too_large"}


class Messages(Api):
    path = "/v1/messages"

    def read(self, body: object, requests: ChatRequests) -> Wanted:
        found = requests.fields(body, _READ.split(), _SAMPLING, messages="messages")
        if not isinstance(found["messages"], list) or "max_tokens" not in found:
            raise Refusal("expected a JSON object with a list of messages, and max_tokens: of the turn, 1 or more")
        said = Api.text_of(found.get("system"), "system")
        system = [{"role": "system", "content": said}] if found.get("system") else []
        tools = [_tool(each) for each in found.get("tools") or ()]
        return Wanted(
            self.path,
            Api.asked([*system, *_messages(found["messages"], requests)]),
            tools,
            most=requests.most("max_tokens", found["max_tokens"]),
            thinking=_budget(found.get("thinking"), requests),
            calls=Api.with_calls(
                found.get("tool_choice"),
                tools,
                same=({"type": "auto"}, {"type": "auto", "disable_parallel_tool_use": False}),
            ),
            stream=bool(found.get("stream")),
            role=requests.role(found.get("model")),
            shows_ids=bool(found.get("return_token_ids")),
        )

    def whole(self, request: Request, said: Said) -> Json:
        content: list[Json] = [
            *([{"type": "thinking", "thinking": said.reasoning, "signature": ""}] if said.reasoning else []),
            *([{"type": "text", "text": said.content}] if said.content or not said.calls else []),
            *({"type": "tool_use", "id": id_, "name": name, "input": arguments} for id_, name, arguments in said.calls),
        ]
        ids = {} if said.prompt_ids is None else {"prompt_token_ids": said.prompt_ids, "token_ids": list(said.tokens)}
        return {**_message(request, content, _REASONS[said.reason], request.prompt, len(said.tokens)), **ids}

    def stream(self, request: Request) -> Stream:
        return _Events(request)

    @staticmethod
    def error(refusal: Refusal) -> Json:
        kind = _ERRORS.get(refusal.status, "invalid_request_error" if refusal.status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": shortened(str(refusal)), "code": refusal.code}}


class _Events(Stream):
    def __init__(self, request: Request) -> None:
        self._request = request
        self._begun = list[str]()  # kinds of the blocks so far

    @staticmethod
    def _event(kind: str, **fields: Any) -> str:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, **fields})}\n\n"

    def begin(self) -> Iterator[str]:
        yield self._event("message_start", message=_message(self._request, [], None, self._request.prompt, 0))

    def _block(self, kind: str, block: Json) -> Iterator[str]:
        yield from self._ended()
        self._begun.append(kind)
        yield self._event("content_block_start", index=len(self._begun) - 1, content_block=block)

    def _delta(self, **delta: Any) -> str:
        return self._event("content_block_delta", index=len(self._begun) - 1, delta=delta)

    def _ended(self) -> Iterator[str]:
        if self._begun:
            yield self._event("content_block_stop", index=len(self._begun) - 1)

    def more(self, kind: Kind, text: str) -> Iterator[str]:
        name = "text" if kind == "content" else "thinking"
        if kind not in self._begun:
            more = {} if kind == "content" else {"signature": ""}
            yield from self._block(kind, {"type": name, name: "", **more})
        yield self._delta(**{"type": f"{name}_delta", name: text})

    def end(self, said: Said) -> Iterator[str]:
        if not said.content and not said.calls:
            yield from self.more("content", "")
        for id_, name, arguments in said.calls:
            yield from self._block("call", {"type": "tool_use", "id": id_, "name": name, "input": {}})
            yield self._delta(type="input_json_delta", partial_json=json.dumps(arguments))
        yield from self._ended()
        whole = Messages().whole(self._request, said)
        delta = {"stop_reason": whole["stop_reason"], "stop_sequence": None, "stop_details": None, "container": None}
        yield self._event("message_delta", delta=delta, usage=whole["usage"])
        yield self._event("message_stop")

    def failed(self, refusal: Refusal) -> Iterator[str]:
        yield f"event: error\ndata: {json.dumps(Messages.error(refusal))}\n\n"


def _message(request: Request, content: list[Json], reason: str | None, read: int, written: int) -> Json:
    return {
        "id": f"msg_{request.id}",
        "type": "message",
        "role": "assistant",
        "model": request.wanted.model,
        "content": content,
        "stop_reason": reason,
        "stop_sequence": None,
        "usage": {"input_tokens": read, "output_tokens": written},
    }


def _tool(value: object) -> Json:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or "input_schema" not in value:
        raise Refusal(f'expected tools as {{"name": ..., "input_schema": ...}}, got {shown(value)}')
    function = {"name": value["name"]} | ({"description": value["description"]} if value.get("description") else {})
    return {"type": "function", "function": {**function, "parameters": value["input_schema"]}}


def _budget(thinking: object, requests: ChatRequests) -> int:
    if thinking is None:
        return 0
    if not isinstance(thinking, dict) or thinking.get("type") != "enabled":
        raise Refusal(
            f"thinking = {shown(thinking)}: the policy thinks as its chat template has it begin: leave thinking out, "
            'or end it after a budget: {"type": "enabled", "budget_tokens": ...}'
        )
    return requests.most("thinking.budget_tokens", thinking.get("budget_tokens"))


def _messages(values: list[object], requests: ChatRequests) -> list[Json]:
    found = list[Json]()
    for number, value in enumerate(values):
        where = f"message {number}"
        role = value.get("role") if isinstance(value, dict) else None
        if not isinstance(value, dict) or role not in ("user", "assistant"):
            raise Refusal(f"{where}: expected one of role user or assistant, got {shown(value)}")
        content = value.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if not isinstance(blocks, list) or not all(isinstance(each, dict) for each in blocks):
            raise Refusal(f"{where}: expected its content to be text or a list of blocks, got {shown(content)}")
        texts = list[Json]()
        for block in blocks:
            kind = block.get("type")
            if role == "user" and kind == "tool_result":
                text = Api.text_of(block.get("content"), where)
                found.append({"role": "tool", "content": text, "tool_call_id": block.get("tool_use_id")})
            elif role == "assistant" and kind == "tool_use":
                call = Api.called(block.get("id"), str(block.get("name")), block.get("input"), where)
                Api.spoken(found, tool_calls=[call])
            elif role == "assistant" and kind == "thinking":
                Api.spoken(found, reasoning_content=Api.text_of(block.get("thinking"), where))
            else:
                texts.append(block)
        if texts and role == "user":
            found.append({"role": "user", "content": requests.content_of(texts, where)})
        elif role == "assistant":
            Api.spoken(found, content=Api.text_of(texts, where))
    return found
