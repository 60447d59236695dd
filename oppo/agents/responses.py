"""OpenAI's responses, as requests and answers of agents."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, Final

from oppo.agents.requests import Api, ChatRequests, Json, Kind, Refusal, Request, Said, Stream, Wanted
from oppo.errors import shown

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SAMPLING: Final = "temperature top_p top_logprobs parallel_tool_calls"
_READ: Final = (
    "input instructions tools tool_choice max_output_tokens thinking_token_budget previous_response_id stream "
    "return_token_ids model user metadata safety_identifier prompt_cache_key store include truncation text"
)
_AS_EVER: Final[Json] = {"truncation": ("disabled",), "text": ({}, {"format": {"type": "text"}})}


class Responses(Api):
    path = "/v1/responses"

    def read(self, body: object, requests: ChatRequests) -> Wanted:
        found = requests.fields(body, _READ.split(), {name: name for name in _SAMPLING.split()}, messages="input")
        for name, values in _AS_EVER.items():
            if name in found and found[name] not in values:
                raise Refusal(f"{name} = {shown(found[name])}: the policy writes text as it is trained: leave it out")
        given = found["input"]
        items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        if not isinstance(items, list):
            raise Refusal(f"expected input to be a text or a list of items, got {shown(given)}")
        instructed = [{"role": "system", "content": Api.text_of(found.get("instructions"), "instructions")}]
        tools = [_tool(each) for each in found.get("tools") or ()]
        return Wanted(
            self.path,
            Api.asked([*(instructed if found.get("instructions") else []), *_messages(items, requests)]),
            tools,
            most=requests.most("max_output_tokens", found.get("max_output_tokens")),
            thinking=requests.most("thinking_token_budget", found.get("thinking_token_budget")),
            calls=Api.with_calls(found.get("tool_choice"), tools),
            stream=bool(found.get("stream")),
            role=requests.role(found.get("model")),
            shows_ids=bool(found.get("return_token_ids")),
            previous=str(found.get("previous_response_id") or "").removeprefix("resp_"),
            options={
                **{name: found.get(name) for name in ("instructions", "max_output_tokens", "previous_response_id")},
                "tools": found.get("tools") or [],
                "metadata": found.get("metadata") or {},
                "tool_choice": found.get("tool_choice") or "auto",
            },
        )

    def whole(self, request: Request, said: Said) -> Json:
        written = len(said.tokens)
        usage = {
            "input_tokens": request.prompt,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": written,
            "output_tokens_details": {"reasoning_tokens": said.thought},
            "total_tokens": request.prompt + written,
        }
        cut = said.reason == "length"
        output = _items(request, said)
        found = _response(request, "incomplete" if cut else "completed", output, usage)
        found["incomplete_details"] = {"reason": "max_output_tokens"} if cut else None
        ids = {} if said.prompt_ids is None else {"prompt_token_ids": said.prompt_ids, "token_ids": list(said.tokens)}
        return {**found, **ids}

    def stream(self, request: Request) -> Stream:
        return _Events(request)


class _Events(Stream):
    def __init__(self, request: Request) -> None:
        self._request = request
        self._number = -1  # of the last event
        self._texts: dict[Kind, str] = {}  # of the items so far

    def _event(self, kind: str, **fields: Any) -> str:
        self._number += 1
        return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': self._number, **fields})}\n\n"

    def begin(self) -> Iterator[str]:
        response = _response(self._request, "in_progress", [], None)
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def more(self, kind: Kind, text: str) -> Iterator[str]:
        if kind not in self._texts:
            yield from self._ended()
            self._texts[kind] = ""
            item = {**_item(self._request, kind, ""), "content": [], "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=len(self._texts) - 1, item=item)
            yield self._event("response.content_part.added", **self._at(kind), part=_part(kind, ""))
        self._texts[kind] += text
        yield self._event(f"response.{_TEXT[kind]}.delta", **self._at(kind), delta=text, **_LOGPROBS[kind])

    def _at(self, kind: Kind) -> Json:
        item = _item(self._request, kind, "")["id"]
        return {"item_id": item, "output_index": list(self._texts).index(kind), "content_index": 0}

    def _ended(self) -> Iterator[str]:
        # Of the item that is being written.
        for kind, text in list(self._texts.items())[-1:]:
            yield self._event(f"response.{_TEXT[kind]}.done", **self._at(kind), text=text, **_LOGPROBS[kind])
            yield self._event("response.content_part.done", **self._at(kind), part=_part(kind, text))
            item = _item(self._request, kind, text)
            yield self._event("response.output_item.done", output_index=len(self._texts) - 1, item=item)

    def end(self, said: Said) -> Iterator[str]:
        if not said.content and not said.calls:
            yield from self.more("content", "")
        yield from self._ended()
        response = Responses().whole(self._request, said)
        for at, item in enumerate(response["output"][len(self._texts) :], len(self._texts)):
            place = {"item_id": item["id"], "output_index": at}
            begun = {**item, "arguments": "", "status": "in_progress"}
            yield self._event("response.output_item.added", output_index=at, item=begun)
            yield self._event("response.function_call_arguments.delta", **place, delta=item["arguments"])
            yield self._event(
                "response.function_call_arguments.done", **place, name=item["name"], arguments=item["arguments"]
            )
            yield self._event("response.output_item.done", output_index=at, item=item)
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, refusal: Refusal) -> Iterator[str]:
        yield self._event("error", **Api.error(refusal), message=str(refusal), code=refusal.code, param=None)


_TEXT: Final[dict[Kind, str]] = {"content": "output_text", "reasoning": "reasoning_text"}
_LOGPROBS: Final[dict[Kind, Json]] = {"content": {"logprobs": []}, "reasoning": {}}


def _part(kind: Kind, text: str) -> Json:
    return {"type": _TEXT[kind], "text": text, **({"annotations": [], "logprobs": []} if kind == "content" else {})}


def _item(request: Request, kind: Kind, text: str) -> Json:
    common = {"status": "completed", "content": [_part(kind, text)]}
    if kind == "reasoning":
        return {"type": "reasoning", "id": f"rs_{request.id}", "summary": [], **common}
    return {"type": "message", "id": f"msg_{request.id}", "role": "assistant", **common}


def _items(request: Request, said: Said) -> list[Json]:
    calls = [
        {
            "type": "function_call",
            "id": f"fc_{id_}",
            "call_id": id_,
            "name": name,
            "arguments": json.dumps(arguments),
            "status": "completed",
        }
        for id_, name, arguments in said.calls
    ]
    return [
        *([_item(request, "reasoning", said.reasoning)] if said.reasoning else []),
        *([_item(request, "content", said.content)] if said.content or not calls else []),
        *calls,
    ]


def _response(request: Request, status: str, output: Sequence[Json], usage: Json | None) -> Json:
    return {
        "id": f"resp_{request.id}",
        "object": "response",
        "created_at": 0,
        "model": request.wanted.model,
        "status": status,
        "output": output,
        "parallel_tool_calls": True,
        "error": None,
        "incomplete_details": None,
        "usage": usage,
        **request.wanted.options,
    }


def _tool(value: object) -> Json:
    if not isinstance(value, dict) or value.get("type") != "function" or not isinstance(value.get("name"), str):
        raise Refusal(f'expected tools as {{"type": "function", "name": ..., "parameters": ...}}, got {shown(value)}')
    function = {name: each for name, each in value.items() if each is not None and name not in ("type", "strict")}
    return {"type": "function", "function": function}


def _messages(items: Sequence[object], requests: ChatRequests) -> list[Json]:
    # What the assistant said is one message: reasoning, text and calls up to the next one of another.
    found = list[Json]()
    for number, item in enumerate(items):
        where = f"input {number}"
        kind = item.get("type", "message") if isinstance(item, dict) else None
        if not isinstance(item, dict) or kind is None:
            raise Refusal(f"{where}: expected an item, got {shown(item)}")
        if kind == "message" and item.get("role") in _ROLES:
            role, content = _ROLES[item["role"]], item.get("content")
            if role == "assistant":
                Api.spoken(found, content=Api.text_of(content, where))
            else:
                read = requests.content_of if role == "user" else Api.text_of
                found.append({"role": role, "content": read(content, where)})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            Api.spoken(found, reasoning_content=Api.text_of(parts, where))
        elif kind == "function_call":
            call = Api.called(item.get("call_id"), str(item.get("name")), item.get("arguments"), where)
            Api.spoken(found, tool_calls=[call])
        elif kind == "function_call_output":
            text = Api.text_of(item.get("output"), where)
            found.append({"role": "tool", "content": text, "tool_call_id": item.get("call_id")})
        else:
            raise Refusal(
                f"{where} is {shown(item.get('role') if kind == 'message' else kind)}: expected a message of role "
                f"{', '.join(_ROLES)}, a reasoning, a function_call or a function_call_output"
            )
    return found
