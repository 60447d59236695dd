"""OpenAI's chat completions, as requests and answers of agents."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from oppo.agents.requests import Api, ChatRequests, Json, Kind, Refusal, Request, Said, Stream, Wanted
from oppo.errors import shown

_ROLES: Final = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_SAMPLING: Final = (
    "stop temperature top_p top_k n frequency_penalty presence_penalty repetition_penalty logit_bias top_logprobs "
    "response_format parallel_tool_calls"
)
_READ: Final = (
    "messages tools tool_choice return_token_ids max_tokens max_completion_tokens thinking_token_budget logprobs "
    "stream stream_options model user metadata safety_identifier prompt_cache_key store"
)


class ChatCompletions(Api):
    path = "/v1/chat/completions"

    def read(self, body: object, requests: ChatRequests) -> Wanted:
        found = requests.fields(body, _READ.split(), {name: name for name in _SAMPLING.split()}, messages="messages")
        if not isinstance(found["messages"], list):
            raise Refusal("expected a JSON object with a list of messages, as of chat completions")
        limits = [requests.most(name, found.get(name)) for name in ("max_tokens", "max_completion_tokens")]
        if found.get("logprobs", False) not in (False, True):
            raise Refusal(f"logprobs = {found['logprobs']!r}: expected true or false")
        options = found.get("stream_options")
        tools = found.get("tools") or []
        return Wanted(
            self.path,
            Api.asked([_message(each, number, requests) for number, each in enumerate(found["messages"])]),
            tools,
            most=min(filter(None, limits), default=0),
            thinking=requests.most("thinking_token_budget", found.get("thinking_token_budget")),
            calls=Api.with_calls(found.get("tool_choice"), tools),
            stream=bool(found.get("stream")),
            role=requests.role(found.get("model")),
            shows_ids=bool(found.get("return_token_ids")),
            shows_logprobs=bool(found.get("logprobs")),
            options={"usage": isinstance(options, dict) and bool(options.get("include_usage"))},
        )

    def whole(self, request: Request, said: Said) -> Json:
        calls = _calls(said)
        message: Json = {"role": "assistant", "content": said.content or (None if calls else "")}
        message |= {"tool_calls": calls} if calls else {}
        message |= {"reasoning_content": said.reasoning} if said.reasoning else {}
        choice = {"index": 0, "message": message, "finish_reason": said.reason, **_shown(request, said)}
        ids = {} if said.prompt_ids is None else {"prompt_token_ids": said.prompt_ids}
        return {**_common(request, "chat.completion"), "choices": [choice], "usage": _usage(request, said), **ids}

    def stream(self, request: Request) -> Stream:
        return _Chunks(request)


class _Chunks(Stream):
    def __init__(self, request: Request) -> None:
        self._request = request

    def _chunk(self, delta: Json, reason: str | None = None, **more: Any) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": reason, "logprobs": None, **more}
        return _event({**_common(self._request, "chat.completion.chunk"), "choices": [choice]})

    def begin(self) -> Iterator[str]:
        yield self._chunk({"role": "assistant", "content": ""})

    def more(self, kind: Kind, text: str) -> Iterator[str]:
        yield self._chunk({"content" if kind == "content" else "reasoning_content": text})

    def end(self, said: Said) -> Iterator[str]:
        calls = [{"index": at, **each} for at, each in enumerate(_calls(said))]
        more = _shown(self._request, said)
        if calls or any(more.values()):
            yield self._chunk({"tool_calls": calls} if calls else {}, **more)
        ended = json.loads(self._chunk({}, said.reason).removeprefix("data: "))
        yield _event(ended | ({} if said.prompt_ids is None else {"prompt_token_ids": said.prompt_ids}))
        if self._request.wanted.options["usage"]:
            yield _event(
                {**_common(self._request, "chat.completion.chunk"), "choices": [], "usage": _usage(self._request, said)}
            )
        yield "data: [DONE]\n\n"

    def failed(self, refusal: Refusal) -> Iterator[str]:
        yield _event(Api.error(refusal))


def _event(data: Json) -> str:
    return f"data: {json.dumps(data)}\n\n"


def _common(request: Request, kind: str) -> Json:
    return {"id": f"chatcmpl-{request.id}", "object": kind, "created": 0, "model": request.wanted.model}


def _calls(said: Said) -> list[Json]:
    return [
        {"id": id_, "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for id_, name, arguments in said.calls
    ]


def _usage(request: Request, said: Said) -> Json:
    read, written = request.prompt, len(said.tokens)
    found: Json = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
    return found | ({"completion_tokens_details": {"reasoning_tokens": said.thought}} if said.thought else {})


def _shown(request: Request, said: Said) -> Json:
    # The token ids and log-probs that were asked for.
    found: Json = {"logprobs": None}
    if said.logprobs is not None:
        content: list[Json] = []
        for text, logprob in said.logprobs:
            parts = None if "\ufffd" in text else list(text.encode())  # the token may be a part of a character
            content.append({"token": text, "logprob": logprob, "bytes": parts, "top_logprobs": []})
        found["logprobs"] = {"content": content, "refusal": None}
    return found | ({"token_ids": list(said.tokens)} if request.wanted.shows_ids else {})


def _message(value: object, number: int, requests: ChatRequests) -> Json:
    role = _ROLES.get(str(value.get("role"))) if isinstance(value, dict) else None
    if role is None or not isinstance(value, dict):
        raise Refusal(f"message {number}: expected one of role {', '.join(_ROLES)}, got {shown(value)}")
    where = f"message {number}"
    read = requests.content_of if role == "user" else Api.text_of
    found: Json = {"role": role, "content": read(value.get("content"), where)}
    found |= {name: value[name] for name in ("name", "tool_call_id", "reasoning_content") if value.get(name)}
    calls = value.get("tool_calls") or ()
    if any(not isinstance(each, dict) or not isinstance(each.get("function"), dict) for each in calls):
        raise Refusal(f"{where} has a call that cannot be read: {shown(calls)}")
    if calls:
        found["tool_calls"] = [
            Api.called(each.get("id"), each["function"].get("name"), each["function"].get("arguments"), where)
            for each in calls
        ]
    return found
