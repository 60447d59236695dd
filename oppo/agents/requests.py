"""Requests of agents in one form, whichever API they came by, and refusals of what the run does not sample."""

from __future__ import annotations

import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, TypeVar

import anyio

from oppo.errors import ConfigError, DataError, one_line, running_loop, shortened, shown
from oppo.events import IntArray
from oppo.images import ImageRef
from oppo.limits import UNLIMITED, TurnLimit
from oppo.models import SamplingSettings

if TYPE_CHECKING:
    from oppo.hf.chat import ChatFormat
    from oppo.hf.processor import ImagePrompts
    from oppo.hf.tokenizer import HfTokenizer

T = TypeVar("T")

Json: TypeAlias = dict[str, Any]

MODEL: Final = "policy"  # the name of the model that agents without roles are served; they may ask for any
FORMATS: Final = 64  # sets of tools whose chat formats are kept
BODY: Final = 8 * 2**20  # the most bytes of a request
LONG: Final = 20_000  # bytes or characters above which they are processed in a thread


class Refusal(Exception):  # noqa: N818 - an answer to an agent
    def __init__(self, message: str, *, code: str = "invalid_request", status: int = 400) -> None:
        super().__init__(message)
        self.code = code
        self.status = status

    def again(self) -> Refusal:
        # An exception holds the frames of each place that has raised it, so each place raises its own.
        return Refusal(str(self), code=self.code, status=self.status)


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request in the one form that all APIs are translated into."""

    api: str  # its path
    messages: list[Json]  # as chat templates read them
    tools: list[Json]  # as chat templates show them
    most: int = 0  # tokens of the answer; 0: as many as there is room for
    thinking: int = 0  # tokens after which it is ended; 0: never
    calls: bool = True  # whether calls of tools are answered as calls; otherwise as text
    stream: bool = False
    shows_ids: bool = False
    shows_logprobs: bool = False
    previous: str = ""  # id of the answer that the messages follow, where they do not include it
    options: Mapping[str, Any] = field(default_factory=dict)  # of the API's own, for its answer
    role: str = ""  # in which it is asked; empty where agents have none

    @property
    def model(self) -> str:
        return self.role or MODEL

    @property
    def digest(self) -> str:
        """Digest of it without the ids that an API gives to parts of messages."""
        return digest_of([getattr(self, name) for name in self.__slots__ if name != "options"])


class Call(NamedTuple):
    id: str
    name: str
    arguments: Json


@dataclass(frozen=True, slots=True)
class Said:
    """An answer in the one form that is translated into each API's."""

    content: str
    reasoning: str = ""
    calls: Sequence[Call] = ()
    reason: Literal["stop", "tool_calls", "length"] = "stop"
    tokens: Sequence[int] = ()
    thought: int = 0  # how many of them are reasoning
    prompt_ids: Sequence[int] | None = None  # the tokens before it, if they were asked for
    logprobs: Sequence[tuple[str, float]] | None = None  # of its tokens, with their texts, likewise


Kind: TypeAlias = Literal["reasoning", "content"]


@dataclass(slots=True, eq=False)
class Request:
    wanted: Wanted
    messages: list[Json]  # with those before, where these follow an answer
    tokens: IntArray  # the prompt, or the tokens after the last turn
    answers: int  # messages of tools behind that
    key: str  # by which its client says what it sends again
    id: str = ""  # of its answer, hexadecimal digits
    prompt: int = 0  # tokens before its answer
    limit: TurnLimit = UNLIMITED
    waiting: int = 0  # connections of its client
    heard: bool = False  # by one of these
    reply: Said | Refusal | None = None
    deltas: list[tuple[Kind, str]] = field(default_factory=list)  # of its answer so far
    news: anyio.Event = field(default_factory=anyio.Event)
    _shown: dict[Kind, str] = field(default_factory=lambda: {"reasoning": "", "content": ""})

    def show(self, reasoning: str, content: str) -> None:
        texts: dict[Kind, str] = {"reasoning": reasoning, "content": content}
        for kind, text in texts.items():
            if len(text) > len(self._shown[kind]) and text.startswith(self._shown[kind]):
                self.deltas.append((kind, text[len(self._shown[kind]) :]))
                self._shown[kind] = text
                self._notify()

    def settle(self, reply: Said | Refusal) -> None:
        if isinstance(reply, Said) and self.wanted.stream:
            self.show(reply.reasoning, reply.content)
        self.reply = reply
        self._notify()

    def _notify(self) -> None:
        self.news.set()
        self.news = anyio.Event()

    async def result(self) -> Said | None:
        self.waiting += 1
        try:
            while self.reply is None and not self.deltas:
                await self.news.wait()
            self.heard = not self.wanted.stream
        finally:
            self.waiting -= 1
        if isinstance(self.reply, Refusal) and not self.deltas:
            raise self.reply.again()
        return None if self.wanted.stream or isinstance(self.reply, Refusal) else self.reply


class Stream(ABC):
    @abstractmethod
    def begin(self) -> Iterator[str]: ...

    @abstractmethod
    def more(self, kind: Kind, text: str) -> Iterator[str]: ...

    @abstractmethod
    def end(self, said: Said) -> Iterator[str]: ...

    @abstractmethod
    def failed(self, refusal: Refusal) -> Iterator[str]: ...


class Api(ABC):
    """An API that agents speak: its requests as :class:`Wanted`, and :class:`Said` as its answers."""

    path: ClassVar[str]

    @abstractmethod
    def read(self, body: object, requests: ChatRequests) -> Wanted: ...

    @abstractmethod
    def whole(self, request: Request, said: Said) -> Json: ...

    @abstractmethod
    def stream(self, request: Request) -> Stream: ...

    @staticmethod
    def error(refusal: Refusal) -> Json:
        kind = "invalid_request_error" if refusal.status < 500 else "server_error"
        return {"error": {"message": shortened(str(refusal)), "type": kind, "param": None, "code": refusal.code}}

    @staticmethod
    def text_of(content: object, where: str) -> str:
        """Return the text of the content of a message: a text, or a list of parts that have one."""
        if content is None or isinstance(content, str):
            return content or ""
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict) or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else part
                raise Refusal(f"{where} shows {shown(kind)}: the policy reads text only there: leave it out")
        if not isinstance(content, list):
            raise Refusal(f"{where}: expected its content to be text, got {shown(content)}")
        return "\n".join(part["text"] for part in content)

    @staticmethod
    def called(call: Any, name: str, arguments: object, where: str) -> Json:
        """Return the call of a tool as a message has it; the arguments are JSON, or a text of it."""
        try:
            read = json.loads(arguments) if isinstance(arguments, str) and arguments else (arguments or {})
        except (ValueError, RecursionError) as error:
            raise Refusal(f"{where} has a call that cannot be read: {one_line(error)}") from error
        if not isinstance(name, str) or not isinstance(read, dict):
            raise Refusal(f"{where} has a call without a name, or whose arguments are no object: {shown(arguments)}")
        return {"id": call, "type": "function", "function": {"name": name, "arguments": read}}

    @staticmethod
    def spoken(messages: list[Json], *, content: str = "", **more: Any) -> None:
        """Add a part of what the assistant said to its message, which is the last one, or begins here."""
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant", "content": ""})
        message = messages[-1]
        message["content"] = "\n".join(filter(None, [message["content"], content]))
        for name, value in more.items():
            if value:
                message[name] = message[name] + value if name in message else value

    @staticmethod
    def asked(messages: list[Json]) -> list[Json]:
        if messages and messages[-1]["role"] == "assistant":
            raise Refusal("the last message is the assistant's: expected one of a user or a tool, to be answered")
        return messages

    @staticmethod
    def with_calls(choice: object, tools: Sequence[Json], *, same: Collection[object] = ("auto",)) -> bool:
        """Return whether calls are answered as calls; ``same`` ask for nothing else than the policy's choice."""
        if choice is None or not tools or choice in same:
            return True
        if choice in ("none", {"type": "none"}):
            return False
        raise Refusal(
            f"tool_choice = {quoted(choice)}: a call that is forced is sampled from other probabilities than the "
            "policy's, of which the engine tells none, so it cannot be trained: leave tool_choice out, or ask for the "
            "call in a message; 'none' has calls answered as text",
            code="unsupported_value",
        )


class ChatRequests:
    """What can be asked for: it is sampled as the run samples."""

    def __init__(self, tokenizer: HfTokenizer, sampling: SamplingSettings, roles: Sequence[str] = ()) -> None:
        self.models = roles or [MODEL]
        self._roles = roles
        self._tokenizer = tokenizer
        self._most = sampling.max_new_tokens
        self._formats: dict[str, tuple[HfTokenizer, ChatFormat]] = {}
        # One thread reads at a time, and the loop short texts meanwhile: to encode leaves a tokenizer as it is.
        self.readers = anyio.CapacityLimiter(1)
        self._stops = sampling.stop_strings
        self.images: ImagePrompts | str = "the policy reads text only (data.images has agents show images)"
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
            "top_logprobs": (0,),
            "response_format": ({"type": "text"},),
            "parallel_tool_calls": (True,),
        }

    def fields(self, body: object, known: Collection[str], same_as: Mapping[str, str], *, messages: str) -> Json:
        # Those that are set: known ones, and none of `same_as`, which are as the run samples under the API's names.
        if not isinstance(body, dict) or not body.get(messages):
            raise Refusal(f"expected a JSON object with {messages!r}, which are not empty")
        found = {name: value for name, value in body.items() if value is not None}
        for name in [each for each in found if each not in known]:
            if name not in same_as:
                raise Refusal(f"{quoted(name)} is no field that the policy's endpoint reads: leave it out")
            value, fixed = found.pop(name), self._fixed[same_as[name]]
            asked = value if same_as[name] == "stop" and isinstance(value, list) else [value]
            if any(each not in fixed for each in asked):
                raise Refusal(
                    f"{name} = {quoted(value)}: the run samples with {name} = {fixed[0]!r}, and trains "
                    f"nothing else: leave {name} out, or change the run's [sampling]",
                    code="unsupported_value",
                )
        return found

    def role(self, model: object) -> str:
        if self._roles and model not in self._roles:
            raise Refusal(
                f"model = {quoted(model)} names no role: expected {' or '.join(map(repr, self._roles))}, the role in "
                "which the conversation is held",
                code="model_not_found",
                status=404,
            )
        return str(model) if self._roles else ""

    def content_of(self, content: object, where: str) -> str | list[Json]:
        """Return the content of a user's message: a text, or with images a list of parts, as chat templates read it."""
        parts = content if isinstance(content, list) else []
        pictures = [part if isinstance(part, dict) and part.get("type") in _IMAGES else None for part in parts]
        if not any(pictures):
            return Api.text_of(content, where)
        return [
            {"type": "text", "text": Api.text_of([part], where)} if picture is None else self._picture(picture, where)
            for part, picture in zip(parts, pictures, strict=True)
        ]

    def _picture(self, part: Json, where: str) -> Json:
        if isinstance(self.images, str):
            raise Refusal(f"{where} shows {shown(part['type'])}, and {self.images}: leave it out")
        held = next((part[name] for name in ("image_url", "source", "image") if part.get(name)), None)
        if isinstance(held, dict):
            held = held.get("url") or f"data:{held.get('media_type')};base64,{held.get('data')}"
        if not isinstance(held, str) or not held.startswith("data:"):
            raise Refusal(
                f"{where} shows an image as {quoted(held)}: expected it in base64, data:image/png;base64,...: nothing "
                "is fetched, and no file is read"
            )
        try:
            return {"type": "image", "image": str(self.images.files.file(held, where))}
        except DataError as error:
            raise Refusal(str(error)) from error

    def prompt(self, tokenizer: HfTokenizer, messages: list[Json]) -> tuple[list[int], tuple[ImageRef, ...]]:
        """Return the tokens of the first messages of a conversation, and the images that they show."""
        if not shows_images(messages) or isinstance(self.images, str):
            return tokenizer.encode_chat(messages), ()
        _, tokens, images = self.images(
            {"prompt": messages}, "prompt", "a request", lambda row, column: (row, tokenizer)
        )
        return tokens, images

    def most(self, name: str, value: object) -> int:
        """Return the limit of a turn in tokens, 0 where the response's is no larger."""
        if value is None:
            return 0
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise Refusal(
                f"{name} = {quoted(value)}: expected a number of tokens, 1 or more: leave {name} out where a turn may "
                f"be as long as its response has room for, sampling.max_new_tokens = {self._most} in all",
                code="unsupported_value",
            )
        return value if value < self._most else 0

    def limit(self, wanted: Wanted) -> TurnLimit:
        if not wanted.thinking:
            return TurnLimit(wanted.most) if wanted.most else UNLIMITED
        if 0 < wanted.most <= wanted.thinking:
            raise Refusal(
                f"a budget of {wanted.thinking} tokens of thinking in a turn of {wanted.most}: expected fewer, so that "
                "tokens are left for the answer"
            )
        if (thinking := self.format(wanted.tools)[1].thinking) is None:
            raise Refusal(
                "the policy's chat template ends thinking with no token of its own, so that a budget of it cannot be "
                "told: leave it out"
            )
        opening, closing, _ = thinking
        return TurnLimit(wanted.most, wanted.thinking, opening, closing)

    @property
    def stops(self) -> Sequence[str]:
        return self._stops

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

    def format(self, tools: list[Json]) -> tuple[HfTokenizer, ChatFormat]:
        from oppo.hf.chat import ChatFormat, chatting  # noqa: PLC0415 - torch takes seconds to import

        for tool in tools if isinstance(tools, list) else [tools]:
            function = tool.get("function") if isinstance(tool, dict) else None
            if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                raise Refusal(
                    'expected tools as {"type": "function", "function": {"name": ..., "parameters": ...}}, got '
                    f"{shown(tool)}"
                )
        key = digest_of(tools)
        if (chosen := self._formats.get(key)) is None:
            try:
                tokenizer = chatting(self._tokenizer, tools=tools, variables=self._tokenizer.variables)
                roles = ("user", "tool") if tools else ("user",)
                try:
                    found = ChatFormat(tokenizer, (*roles, "system"))
                except ConfigError:  # many templates have system messages at the beginning only
                    found = ChatFormat(tokenizer, roles)
                found.parse([])  # which reads the schemas
            except ConfigError as error:
                raise Refusal(str(error)) from error
            except Exception as error:  # any kind: the schemas are the agent's
                raise Refusal(f"the tools cannot be read: {one_line(error)}") from error
            chosen = tokenizer, found
            self._formats = {**dict([*self._formats.items()][1 - FORMATS :]), key: chosen}
        return chosen


_IMAGES: Final = ("image_url", "input_image", "image")


def shows_images(messages: Sequence[Json]) -> bool:
    return any(isinstance(each["content"], list) for each in messages)


def quoted(value: object) -> str:
    return shortened(repr(value), 200)


async def apart(size: int, work: Callable[[], T], threads: anyio.CapacityLimiter | None = None) -> T:
    # Large work in a thread, of these, so that the event loop goes on.
    if size < LONG or getattr(running_loop(), "virtual", False):
        return work()
    return await anyio.to_thread.run_sync(work, limiter=threads)


def digest_of(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=repr).encode()).hexdigest()
