"""The conversations of one agent: requests as OpenAI's clients send them, answered with turns of the policy."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias, cast
from zlib import crc32

import anyio
import numpy as np

from oppo.agents.bounds import MESSAGES, apart, read_json
from oppo.agents.history import digest_of, essence, first_difference, plain
from oppo.environments import EnvironmentFailure
from oppo.errors import ConfigError, OppoError, one_line, shortened, shown
from oppo.events import Drop, IntArray
from oppo.models import SamplingSettings

if TYPE_CHECKING:
    from oppo.hf.chat import ChatFormat
    from oppo.hf.tokenizer import HfTokenizer

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


class Refusal(Exception):  # noqa: N818 - an answer to an agent
    """An error as OpenAI's servers answer it."""

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
    tokens: IntArray  # the prompt, or what is read after the turn before
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
                raise Refusal(f"{_quoted(name)} is no field that the policy's endpoint reads: leave it out")
            asked = value if name == "stop" and isinstance(value, list) else [value]
            if any(each not in self._fixed[name] for each in asked):
                raise Refusal(
                    f"{name} = {_quoted(value)}: the run samples with {name} = {self._fixed[name][0]!r}, and trains "
                    f"nothing else: leave {name} out, or change the run's [sampling]",
                    code="unsupported_value",
                )
        for name in ("max_tokens", "max_completion_tokens"):
            most = body.get(name)
            if most is not None and (not isinstance(most, int) or most < self._most):
                raise Refusal(
                    f"{name} = {_quoted(most)}: a turn may be as long as its response has room for, "
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
        if (count := len(body["messages"])) > MESSAGES:
            raise Refusal(f"there are {count} messages, more than {MESSAGES}: leave some out")
        found = [_message(each, number) for number, each in enumerate(body["messages"])]
        if found[-1]["role"] == "assistant":
            raise Refusal("the last message is the assistant's: expected one of a user or a tool, to be answered")
        return found

    def format(self, tools: object) -> tuple[HfTokenizer, ChatFormat]:
        """Return the tokenizer that shows these tools, and its chat format."""
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


def _quoted(value: object) -> str:
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
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise Refusal(f"message {number} has a call that cannot be read: {one_line(error)}") from error
    return found


def _called(call: Any) -> Json:
    function = call["function"]
    arguments = function.get("arguments") or {}
    read = read_json(arguments) if isinstance(arguments, str) else arguments
    return {"id": call.get("id"), "type": "function", "function": {"name": function["name"], "arguments": read}}


def _without(end: str, text: str) -> str:
    return text.rstrip().removesuffix(end).rstrip()


class Conversation:
    """The messages of one context."""

    def __init__(self, requests: ChatRequests, rollout: str) -> None:
        self.branch = 0  # of a further one a hash of its prompt, so that it does not depend on timing
        self.told = 0  # turns that the agent was told
        self.given = ""  # a digest of what was read after them
        self.full: Refusal | None = None  # refuses whatever continues it
        self.telling = anyio.Lock()  # held by who tells it turns of a rollout
        self.last: Request | None = None
        self.said: set[str] = set()  # digests of its turns
        self._requests = requests
        self.rollout = rollout
        self._tools: object = []
        self._format: tuple[HfTokenizer, ChatFormat] | None = None
        self._messages: list[Json] = []
        self._names: dict[str, tuple[str, str]] = {}
        self._turn: list[int] = []
        self._read: list[int] = []

    @property
    def begun(self) -> bool:
        return self._format is not None

    @property
    def request(self) -> Request | None:
        """The request that waits for a turn."""
        return None if self.last is None or self.last.reply is not None else self.last

    def continued_by(self, messages: Sequence[Json], tools: object) -> int:
        """The number of messages that it holds already, if these continue it; else 0."""
        before, same = self._before(messages)
        goes_on = same == len(before) < len(messages) and digest_of(tools) == digest_of(self._tools)
        return same if goes_on and self.request is None else 0

    def held(self, messages: Sequence[Json]) -> int:
        """The number of its messages with which these begin."""
        return self._before(messages)[1]

    def change(self, messages: Sequence[Json], tools: object) -> str:
        """The difference of these messages from its own, if they show its turns after other words; else empty."""
        before, same = self._before(messages)
        if same == len(before):
            others = before and self.request is None and digest_of(tools) != digest_of(self._tools)
            return first_difference(self._tools, tools, "tools") if others else ""
        turned = before[same]["role"] == "assistant" and same < len(messages) and messages[same]["role"] == "assistant"
        if not turned and self.said.isdisjoint(map(essence, messages[same:])):
            return ""
        return first_difference(plain(before[same]), plain(messages[same]), f"message {same}")

    async def ask(self, fields: Json, messages: list[Json], digest: str, *, key: str, single: str) -> Request:
        """Take a request; ``single`` says why it may begin no other conversation."""
        if self.full is not None:
            raise self.full.again()
        if self.request is not None:
            raise Refusal(
                f"a request of this key is unanswered, and another came: a key has one conversation, since {single}, "
                "so await each answer before the next request"
            )
        tools = fields.get("tools") or []
        size = sum(len(each["content"]) for each in messages)
        read = partial(self._following, single=single) if self.begun else self._prompt
        tokens, answers = await apart(size, partial(read, messages, tools))
        if self.full is not None:  # meanwhile
            raise self.full.again()
        ids, logprobs = bool(fields.get("return_token_ids")), bool(fields.get("logprobs"))
        self.last = Request(messages, np.array(tokens, np.int32), answers, digest, ids, logprobs, key)
        self.given = digest_of([self.given, tokens])
        return self.last

    def _before(self, messages: Sequence[Json]) -> tuple[list[Json], int]:
        # What was said, as these messages would show it, and how many of them are that.
        before = self._messages
        if before and not before[-1]["content"].strip() and not before[-1].get("tool_calls"):
            shown_again = any(each["role"] == "assistant" for each in messages[len(before) - 1 :])
            before = before if shown_again else before[:-1]  # frameworks leave out an answer that says nothing
        pairs = zip(map(plain, messages), map(plain, before), strict=False)
        known = min(len(messages), len(before))
        return before, next((at for at, (now, then) in enumerate(pairs) if now != then), known)

    def _prompt(self, messages: list[Json], tools: object) -> tuple[list[int], int]:
        chosen = self._requests.format(tools)
        try:
            tokens = chosen[0].encode_chat(messages)
        except Exception as error:  # any kind: a template is a program
            raise Refusal(f"the policy's chat template cannot render the messages: {one_line(error)}") from error
        self._format, self._tools = chosen, tools
        return tokens, 0

    def _following(self, messages: list[Json], tools: object, single: str) -> tuple[list[int], int]:
        before, same = self._before(messages)
        wanted = (
            "expected the messages of the request before, then its answer, then new ones: a key has one conversation, "
            f"since {single}, so leave out what begins another or changes what was said, such as a summary"
        )
        if digest_of(tools) != digest_of(self._tools):
            raise Refusal(f"{first_difference(self._tools, tools, 'tools')}; {wanted}", code="history_changed")
        if same < len(before):
            now = plain(messages[same]) if same < len(messages) else None
            difference = first_difference(plain(before[same]), now, f"message {same}")
            raise Refusal(f"{difference}; {wanted}", code="history_changed")
        if not (added := messages[len(before) :]):
            raise Refusal(f"nothing follows the answer; {wanted}", code="history_changed")
        assert self._format is not None  # noqa: S101 - of the first request
        _, chat = self._format
        said = []
        for number, message in enumerate(added, len(before)):
            if message["role"] not in chat.roles:
                raise Refusal(
                    f"message {number} is one of role {message['role']!r}, after a turn: expected "
                    f"{' or '.join(sorted(chat.roles))}"
                )
            said.append(self._as_answer(message, number))
        try:
            return chat.answer(self._turn, said), sum(each["role"] == "tool" for each in said)
        except ConfigError as error:
            raise Refusal(str(error)) from error
        except Exception as error:  # any kind, likewise
            raise Refusal(f"the policy's chat template cannot render the messages: {one_line(error)}") from error

    def _as_answer(self, message: Json, number: int) -> Json:
        if message["role"] != "tool":
            return message
        called = str(message.get("tool_call_id"))
        if called not in self._names:
            raise Refusal(f"message {number} answers the call {_quoted(called)}, which the turn before did not make")
        name, own = self._names[called]
        return {"role": "tool", "name": name, "content": message["content"], "tool_call_id": own}

    def tell(self, turn: Sequence[int], logprobs: Sequence[float] = (), *, whole: bool = True) -> None:
        """Answer the waiting request with a turn; ``whole``: it was not cut off."""
        request = self.request
        assert request is not None  # noqa: S101 - whoever calls has heard it
        assert self._format is not None  # noqa: S101 - of the first request
        tokenizer, chat = self._format
        self._turn = list(turn)
        parsed = chat.parse(self._turn)
        content, reasoning, calls = parsed.content, parsed.reasoning, list[Json]()
        if parsed.malformed:
            content = tokenizer.decode(self._turn)
        if stopped := self._requests.stopped(tokenizer, self._turn).strip():
            reasoning = reasoning if content else _without(stopped, reasoning)
            content = _without(stopped, content)
        self._names = {}
        for call in () if parsed.malformed else parsed.tool_calls:
            key = self._id(len(calls))[:9]  # of letters and digits, as Mistral's templates ask for
            self._names[key] = (call.name, call.id)
            function = {"name": call.name, "arguments": dict(call.arguments)}
            calls.append({"id": key, "type": "function", "function": function})
        message: Json = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = calls
        self._messages = [*request.messages, message]
        self.said |= {essence(message)} - {""}
        self.told += 1
        self._read += request.tokens.tolist()
        reason = "tool_calls" if calls else "stop"
        completion = self._completion(request, message, reasoning, reason if whole else "length")
        if request.shows_logprobs:
            completion["choices"][0]["logprobs"] = _logprobs(self._turn, logprobs, tokenizer)
        request.settle(completion)
        self._read += self._turn

    def _id(self, *of: object) -> str:
        # Another for each turn of each conversation, and the same when its agent is run anew.
        return digest_of([self.rollout, self.branch, self.told, self._turn, *of])

    def _completion(self, request: Request, message: Json, reasoning: str, reason: str) -> Json:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.dumps(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        said = {"role": "assistant", "content": message["content"] or (None if calls else "")}
        said |= ({"tool_calls": calls} if calls else {}) | ({"reasoning_content": reasoning} if reasoning else {})
        choice: Json = {"index": 0, "message": said, "logprobs": None, "finish_reason": reason}
        read, written = len(self._read), len(self._turn)
        found: Json = {
            "id": f"chatcmpl-{self._id()[:24]}",
            "object": "chat.completion",
            "created": 0,
            "model": MODEL,
            "choices": [choice | ({"token_ids": self._turn} if request.shows_ids else {})],
            "usage": {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written},
        }
        return found | ({"prompt_token_ids": [*self._read]} if request.shows_ids else {})

    def refuse(self, refusal: Refusal) -> None:
        """Refuse the waiting request and later ones."""
        self.full = refusal
        if (request := self.request) is not None:
            request.settle(refusal)


def _logprobs(turn: Sequence[int], logprobs: Sequence[float], tokenizer: HfTokenizer) -> Json:
    content: list[Json] = []
    for token, logprob in zip(turn, logprobs, strict=True):
        text = tokenizer.decode_whole([token])
        parts = None if "\ufffd" in text else list(text.encode())  # the token may be a part of a character
        content.append({"token": text, "logprob": logprob, "bytes": parts, "top_logprobs": []})
    return {"content": content, "refusal": None}


MOST: Final = 64
"""Conversations that an agent may hold."""

BRANCHES: Final = 2**20
"""Above their numbers."""

ENDED: Final = Refusal("the rollout of this key has ended", code="rollout_ended")


class Session:
    """The conversations of an agent with the policy: the requests of one key.

    Args:
        timeout: seconds in which an agent that waits for no answer sends a request or ends; then it has failed.
        single: why it holds one conversation only; empty if it may hold several.
        expected: conversations of a resumed run that the agent has not begun anew.
        longest: tokens of the longest prompt.
    """

    def __init__(
        self,
        rollout: str,
        columns: Mapping[str, object],
        requests: ChatRequests,
        failure: Callable[[str], OppoError],
        timeout: float | None,
        *,
        single: str,
        expected: set[int],
        longest: float,
        evaluated: bool,
    ) -> None:
        self.columns = columns
        self.evaluated = evaluated
        self.scope = anyio.CancelScope()
        self.outcome: float | Drop | EnvironmentFailure | None = None  # of an agent that has ended
        self.failure = failure
        self.conversations = {0: Conversation(requests, rollout)}
        self.open = {0}  # those whose responses have no reward yet
        self.unopened: list[Conversation] = []  # those for which no response was begun
        self.changes = 0  # requests that changed what was said
        self.change = ""  # how the first of them did
        self.rollout = rollout
        self._requests = requests
        self._timeout = math.inf if timeout is None else timeout
        self.single = single
        self._expected = expected
        self._longest = longest
        self._closed = False
        self._asking = anyio.Lock()  # reading takes time, and the next may continue what is read
        self._full: Refusal | None = None
        self._news = anyio.Event()

    @property
    def first(self) -> Conversation:
        return self.conversations[0]

    async def ask(self, body: Json, *, again: bool = False, key: str = "") -> tuple[Request, bool]:
        """Return the request that ``body`` is, and whether it was sent before.

        Args:
            again: the client says that it is a retry.
            key: its idempotency key; empty if none.
        """
        digest = digest_of(body)
        async with self._asking:
            if (found := self._sent_before(digest, again=again, key=key)) is not None:
                return found, True
            if self._closed:
                raise ENDED.again()
            return await self._take(body, digest, key), False

    async def _take(self, body: Json, digest: str, key: str) -> Request:
        fields = self._requests.check(body)
        messages, tools = self._requests.messages(fields), fields.get("tools") or []
        talk = max(self.conversations.values(), key=lambda each: each.continued_by(messages, tools))
        if self.first.begun and not talk.continued_by(messages, tools):
            nearest = max(self.conversations.values(), key=lambda each: each.held(messages))
            change = nearest.change(messages, tools)
            self.changes, self.change = self.changes + bool(change), self.change or change
            talk = self._another()
        request = await talk.ask(fields, messages, digest, key=key, single=self.single)
        if self._closed:  # meanwhile
            raise ENDED.again()
        if talk is not self.first and not talk.branch:
            self._begin(talk, request)
        self.notify()
        return request

    def _sent_before(self, digest: str, *, again: bool, key: str) -> Request | None:
        last = [each.last for each in self.conversations.values() if each.last is not None]
        same = [each for each in last if (each.key == key if key else again and each.digest == digest)]
        if any(each.digest != digest for each in same):
            raise Refusal(f"another request had the Idempotency-Key {shown(key)}: give each its own", status=422)
        # Of equal ones that whose client has left without its answer, else the newest.
        return max(reversed(same), key=lambda each: not each.heard and not each.waiting, default=None)

    def _another(self) -> Conversation:
        if self.single:
            return self.first  # which refuses it, and says why
        if len(self.conversations) == MOST:
            raise Refusal(f"an agent may hold {MOST} conversations: continue one of them")
        return Conversation(self._requests, self.rollout)

    def _begin(self, talk: Conversation, request: Request) -> None:
        if len(request.tokens) > self._longest:
            raise Refusal(
                f"the first request of another conversation has {len(request.tokens)} tokens, more than "
                f"{self._longest:.0f}: shorten its messages",
                code="context_length_exceeded",
            )
        talk.branch = crc32(request.tokens.tobytes()) % BRANCHES
        while talk.branch in self.conversations:
            talk.branch = (talk.branch + 1) % BRANCHES
        if talk.branch in self._expected:
            self._expected.remove(talk.branch)
        elif self._full is not None:
            raise self._full.again()
        else:
            self.unopened.append(talk)
        self.conversations[talk.branch] = talk
        self.open.add(talk.branch)

    def notify(self) -> None:
        self._news.set()
        self._news = anyio.Event()

    async def held(self, branch: int) -> Conversation | None:
        """Return a conversation once the agent has begun it; ``None`` if it ended before."""
        await self._wait(lambda: branch in self.conversations)
        return self.conversations.get(branch)

    async def heard(self, talk: Conversation) -> Request | None:
        """Return the agent's next request in a conversation; ``None`` once it has ended."""
        await self._wait(lambda: talk.request is not None)
        if self.outcome is not None and talk.request is not None:
            raise self.failure("returned while its request was unanswered: expected it to await each answer")
        return talk.request

    async def ended(self) -> None:
        """Wait until the agent has ended; one that does nothing for too long is ended."""
        try:
            await self._wait(lambda: False)
        except EnvironmentFailure as failure:
            if self.outcome is None:
                self.end(failure)

    async def _wait(self, there: Callable[[], bool]) -> None:
        while self.outcome is None and not there():
            news, idle = self._news, all(each.request is None for each in self.conversations.values())
            with anyio.move_on_after(self._timeout if idle else math.inf) as waiting:
                await news.wait()
            if waiting.cancelled_caught:
                raise self.failure(
                    f"neither asked for anything nor returned within {self._timeout:g} s: raise the timeout, or see "
                    "what it waits for"
                )
        if isinstance(self.outcome, EnvironmentFailure):
            raise self.outcome

    def end(self, outcome: float | Drop | EnvironmentFailure) -> None:
        self.outcome = outcome
        self.fill(ENDED)
        self.notify()

    def fill(self, refusal: Refusal) -> None:
        """Refuse conversations for which no response was begun, and further ones."""
        self._full = refusal
        for each in self.unopened:
            each.refuse(refusal)
        self.open -= {each.branch for each in self.unopened}
        self.unopened.clear()

    def close(self) -> None:
        self._closed = True
        for each in self.conversations.values():
            each.refuse(ENDED)
