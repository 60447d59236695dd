"""The conversations of one agent: requests, answered with turns of the policy."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from zlib import crc32

import anyio
import numpy as np

from oppo.agents.requests import (
    LONG,
    Api,
    Call,
    ChatRequests,
    Json,
    Refusal,
    Request,
    Said,
    Wanted,
    apart,
    digest_of,
    quoted,
    shows_images,
)
from oppo.environments import EnvironmentFailure
from oppo.errors import ConfigError, DataError, OppoError, one_line, shown
from oppo.events import Drop
from oppo.images import ImageRef
from oppo.observe import WorkContext
from oppo.turns import GrowingText

if TYPE_CHECKING:
    from oppo.hf.chat import ChatFormat
    from oppo.hf.tokenizer import HfTokenizer

Earned: TypeAlias = float | Mapping[str, float] | Drop
"""The result of an agent: its reward, or those of its roles."""

CONTEXT: Final = 40  # characters before the first difference of two texts that are shown


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    # Clients add fields, and leave reasoning out.
    content = message["content"].strip() if message["role"] == "assistant" else message["content"]
    kept = {name: message.get(name) for name in ("role", "tool_call_id", "tool_calls")}
    return {**kept, "content": content}


def essence(message: Mapping[str, Any]) -> str:
    """Return a digest of an assistant's message whatever its calls' ids; empty if it says nothing."""
    if message["role"] != "assistant":
        return ""
    said = [message["content"].strip(), [each["function"] for each in message.get("tool_calls", ())]]
    return digest_of(said) if any(said) else ""


def first_difference(then: Any, now: Any, at: str) -> str:
    pairs: dict[str, tuple[Any, Any]] = {}
    if isinstance(then, dict) and isinstance(now, dict):
        pairs = {f"{at}.{key}": (then.get(key), now.get(key)) for key in {**then, **now}}
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = {f"{at}[{number}]": pair for number, pair in enumerate(zip(then, now, strict=True))}
    for place, (old, new) in pairs.items():
        if old != new:
            return first_difference(old, new, place)
    if isinstance(then, str) and isinstance(now, str):
        same = next((at for at, (old, new) in enumerate(zip(then, now, strict=False)) if old != new), len(now))
        then, now = (f"...{each[same - CONTEXT :]}" if same > CONTEXT else each for each in (then, now))
    return f"{at} was {shown(then)}, and now is {shown(now)}"


def _without(end: str, text: str) -> str:
    return text.rstrip().removesuffix(end).rstrip()


class Conversation:
    # The messages of one context.
    def __init__(self, requests: ChatRequests, rollout: str, role: str = "") -> None:
        self.role = role
        self.branch = 0  # of a further one a hash of its prompt, so that it does not depend on timing; below 0: frozen
        self.told = 0  # turns that the agent was told
        self.given = ""  # a digest of the tokens read after them
        self.full: Refusal | None = None  # refuses whatever continues it
        self.telling = anyio.Lock()  # held while turns of a rollout are added
        self.last: Request | None = None
        self.said: set[str] = set()  # digests of its turns
        self._requests = requests
        self.rollout = rollout
        self._tools: list[Json] = []
        self._format: tuple[HfTokenizer, ChatFormat] | None = None
        self.messages: list[Json] = []
        self.images: tuple[ImageRef, ...] = ()
        self._names: dict[str, tuple[str, str]] = {}
        self._turn: list[int] = []
        self._text: GrowingText | None = None  # of a turn that is streamed
        self._read: list[int] = []

    @property
    def prompt(self) -> list[int]:
        return [*self._read, *([] if self.request is None else self.request.tokens.tolist())]

    @property
    def begun(self) -> bool:
        return self._format is not None

    @property
    def request(self) -> Request | None:
        return None if self.last is None or self.last.reply is not None else self.last

    def continued_by(self, messages: Sequence[Json], tools: list[Json]) -> int:
        # The number of messages that it holds already, if these continue it; else 0.
        before, same = self._before(messages)
        goes_on = same == len(before) < len(messages) and digest_of(tools) == digest_of(self._tools)
        return same if goes_on and self.request is None else 0

    def held(self, messages: Sequence[Json]) -> int:
        # How many of its messages these begin with.
        return self._before(messages)[1]

    def change(self, messages: Sequence[Json], tools: list[Json]) -> str:
        """The difference of these messages from its own, if they show its turns after other words; else empty."""
        before, same = self._before(messages)
        if same == len(before):
            others = before and self.request is None and digest_of(tools) != digest_of(self._tools)
            return first_difference(self._tools, tools, "tools") if others else ""
        turned = before[same]["role"] == "assistant" and same < len(messages) and messages[same]["role"] == "assistant"
        if not turned and self.said.isdisjoint(map(essence, messages[same:])):
            return ""
        return first_difference(plain(before[same]), plain(messages[same]), f"message {same}")

    async def ask(self, wanted: Wanted, messages: list[Json], *, key: str, single: str) -> Request:
        """Take a request; ``single`` says why it may begin no other conversation."""
        if self.full is not None:
            raise self.full.again()
        if self.request is not None:
            raise Refusal(
                f"a request of this key is unanswered, and another came: a key has one conversation, since {single}, "
                "so await each answer before the next request"
            )
        if self.last is not None and self.last.wanted.api != wanted.api:
            raise Refusal(
                f"a conversation that began by POST to {self.last.wanted.api} goes on there: expected no request to "
                f"{wanted.api} in it"
            )
        limit = self._requests.limit(wanted)
        size = LONG if not self.begun and shows_images(messages) else sum(len(each["content"]) for each in messages)
        read = partial(self._following, single=single) if self.begun else self._prompt
        tokens, answers = await apart(size, partial(read, messages, wanted.tools), self._requests.readers)
        if self.full is not None:  # meanwhile
            raise self.full.again()
        self.last = Request(
            wanted,
            messages,
            np.array(tokens, np.int32),
            answers,
            key,
            prompt=len(self._read) + len(tokens),
            limit=limit,
        )
        self.given = digest_of([self.given, tokens])
        return self.last

    def _before(self, messages: Sequence[Json]) -> tuple[list[Json], int]:
        # What was said, as these messages would show it, and how many of them are that.
        before = self.messages
        if before and not before[-1]["content"].strip() and not before[-1].get("tool_calls"):
            shown_again = any(each["role"] == "assistant" for each in messages[len(before) - 1 :])
            before = before if shown_again else before[:-1]  # frameworks leave out an answer that says nothing
        pairs = zip(map(plain, messages), map(plain, before), strict=False)
        known = min(len(messages), len(before))
        return before, next((at for at, (now, then) in enumerate(pairs) if now != then), known)

    def _prompt(self, messages: list[Json], tools: list[Json]) -> tuple[list[int], int]:
        chosen = self._requests.format(tools)
        try:
            tokens, self.images = self._requests.prompt(chosen[0], messages)
        except DataError as error:
            raise Refusal(str(error)) from error
        except Exception as error:  # any kind: a template is a program
            raise Refusal(f"the policy's chat template cannot render the messages: {one_line(error)}") from error
        self._format, self._tools = chosen, tools
        return tokens, 0

    def _following(self, messages: list[Json], tools: list[Json], single: str) -> tuple[list[int], int]:
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
        if shows_images(added):
            raise Refusal("an image follows an answer: images are read in the request that begins a conversation")
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
            raise Refusal(f"message {number} answers the call {quoted(called)}, which the turn before did not make")
        name, own = self._names[called]
        return {"role": "tool", "name": name, "content": message["content"], "tool_call_id": own}

    @property
    def streams(self) -> bool:
        return self.request is not None and self.request.wanted.stream

    def follow(self, tokens: Sequence[int]) -> None:
        if self.request is not None and self._format is not None:
            request, (_, chat) = self.request, self._format
            if self._text is None:
                self._text = GrowingText(chat.tokenizer.decode_whole)
            request.show(*chat.so_far(tokens, self._requests.stops, calls=request.wanted.calls, decode=self._text))

    def tell(self, turn: Sequence[int], logprobs: Sequence[float] = (), *, cut: bool = False) -> None:
        # `cut`: the response had no room for more.
        request = self.request
        assert request is not None  # noqa: S101 - the caller has received it
        assert self._format is not None  # noqa: S101 - of the first request
        tokenizer, chat = self._format
        self._turn, self._text = list(turn), None
        parsed = chat.parse(self._turn)
        content, reasoning, calls = parsed.content, parsed.reasoning, list[Call]()
        if parsed.malformed or not request.wanted.calls:
            content = parsed.text or content
        if stopped := self._requests.stopped(tokenizer, self._turn).strip():
            reasoning = reasoning if content else _without(stopped, reasoning)
            content = _without(stopped, content)
        self._names = {}
        for call in () if parsed.malformed or not request.wanted.calls else parsed.tool_calls:
            key = self.id_of(len(calls))[:9]  # of letters and digits, as Mistral's templates ask for
            self._names[key] = (call.name, call.id)
            calls.append(Call(key, call.name, dict(call.arguments)))
        message: Json = {"role": "assistant", "content": content}
        if calls:
            message["tool_calls"] = [Api.called(*call, "the answer") for call in calls]
        self.messages = [*request.messages, message]
        self.said |= {essence(message)} - {""}
        self._read += request.tokens.tolist()
        capped = len(turn) == request.limit.tokens and not chat.ends.intersection(turn[-1:]) and not stopped
        request.settle(
            Said(
                content,
                reasoning,
                calls,
                "length" if cut or capped else "tool_calls" if calls else "stop",
                self._turn,
                thought=chat.thought(self._turn) if reasoning else 0,
                prompt_ids=[*self._read] if request.wanted.shows_ids else None,
                logprobs=_logprobs(self._turn, logprobs, tokenizer) if request.wanted.shows_logprobs else None,
            )
        )
        self.told += 1
        self._read += self._turn

    def interruption(self, turn: Sequence[int]) -> list[int]:
        """Return the tokens that end the thinking of a turn whose budget of it has been had; none: it was not."""
        request = self.request
        if request is None or self._format is None or not request.limit.interrupts(turn):
            return []
        _, chat = self._format
        return [] if chat.thinking is None or chat.ends.intersection(turn[-1:]) else chat.thinking[2]

    def id_of(self, *of: object) -> str:
        # Another for each turn of each conversation, and the same when its agent is run anew.
        return digest_of([self.rollout, self.branch, self.told, *of])

    def refuse(self, refusal: Refusal) -> None:
        self.full = refusal
        if (request := self.request) is not None:
            request.settle(refusal)


def _logprobs(turn: Sequence[int], logprobs: Sequence[float], tokenizer: HfTokenizer) -> list[tuple[str, float]]:
    return [(tokenizer.decode_whole([token]), logprob) for token, logprob in zip(turn, logprobs, strict=True)]


MOST: Final = 64  # conversations that an agent may hold
BRANCHES: Final = 2**20  # above their numbers
ENDED: Final = Refusal("the rollout of this key has ended", code="rollout_ended")


@dataclass(eq=False)
class Session:
    """The conversations of an agent with the policy: the requests of one key."""

    rollout: str
    columns: Mapping[str, object]
    requests: ChatRequests
    failure: Callable[[str], OppoError]
    timeout: float | None
    single: str
    expected: set[int]
    longest: float
    evaluation: WorkContext | None
    frozen: Mapping[str, object]  # roles that others than the policy play
    play: Callable[[Session, Conversation], None]
    outcome: Earned | OppoError | None = None  # of an agent that has ended
    unopened: list[Conversation] = field(default_factory=list)  # those for which no response was begun
    changes: int = 0  # requests that changed earlier messages
    change: str = ""  # how the first of them did
    refused: str = ""  # why its first request of those that were refused was

    def __post_init__(self) -> None:
        self.scope = anyio.CancelScope()
        self.conversations = {0: Conversation(self.requests, self.rollout)}
        self.open = {0}  # those whose responses have no reward yet
        self.drawn = Counter[int]()  # turns of frozen roles, by their prompt
        self._closed = False
        self._asking = anyio.Lock()  # reading takes time, and the next may continue what is read
        self._full: Refusal | None = None
        self._news = anyio.Event()

    @property
    def trained(self) -> int:
        return sum(branch >= 0 for branch in self.conversations)

    @property
    def first(self) -> Conversation:
        return self.conversations[0]

    async def ask(self, api: Api, body: Json, size: int, *, again: bool, key: str) -> tuple[Request, bool]:
        # The request, of `size` bytes, and whether it came before. `again`: so its client says; `key`: its idempotency.
        async with self._asking:
            try:
                wanted = await apart(size, partial(api.read, body, self.requests), self.requests.readers)
                if (found := self._sent_before(wanted.digest, again=again, key=key)) is not None:
                    return found, True
                if self._closed:
                    raise ENDED.again()
                return await self._take(wanted, key), False
            except Refusal as refusal:
                self.refused = self.refused or str(refusal)
                raise

    async def _take(self, wanted: Wanted, key: str) -> Request:
        messages, tools = self._whole(wanted), wanted.tools
        frozen, own = wanted.role in self.frozen, [each for each in self.conversations.values() if each.begun]
        own = [each for each in own if each.role == wanted.role]
        talk = max(own, key=lambda each: each.continued_by(messages, tools), default=self.first)
        if (self.first.begun or frozen) and not (talk in own and talk.continued_by(messages, tools)):
            nearest = max(own, key=lambda each: each.held(messages), default=None)
            change = "" if nearest is None else nearest.change(messages, tools)
            self.changes, self.change = self.changes + bool(change), self.change or change
            talk = self._another(wanted.role)
        elif not talk.begun:
            talk.role = wanted.role
        request = await talk.ask(wanted, messages, key=key, single=self.single)
        if self._closed:  # meanwhile
            raise ENDED.again()
        if frozen and not talk.branch:
            talk.branch = min(self.conversations) - 1
            self.conversations[talk.branch] = talk
        elif talk is not self.first and not talk.branch:
            self._begin(talk, request)
        request.id = talk.id_of()[:24]
        self.notify()
        if frozen:
            self.play(self, talk)
        return request

    def _sent_before(self, digest: str, *, again: bool, key: str) -> Request | None:
        last = [each.last for each in self.conversations.values() if each.last is not None]
        same = [each for each in last if each.key == key and (key or (again and each.wanted.digest == digest))]
        if any(each.wanted.digest != digest for each in same):
            raise Refusal(f"another request had the Idempotency-Key {shown(key)}: give each its own", status=422)
        # Of equal ones that whose client has left without its answer, else the newest.
        return max(reversed(same), key=lambda each: not each.heard and not each.waiting, default=None)

    def _whole(self, wanted: Wanted) -> list[Json]:
        # The messages, with those that their client has left out.
        if not wanted.previous:
            return wanted.messages
        for talk in self.conversations.values():
            if talk.last is not None and talk.last.id == wanted.previous and isinstance(talk.last.reply, Said):
                system = [each for each in wanted.messages[:1] if each["role"] == "system"]
                held = talk.messages
                return [*held, *(wanted.messages[1:] if system and system == held[:1] else wanted.messages)]
        raise Refusal(
            "previous_response_id is the last answer of no conversation of this key: expected that of the one that "
            "goes on, or all of its messages as input",
            code="previous_response_not_found",
        )

    def _another(self, role: str) -> Conversation:
        if self.single and role not in self.frozen:
            if role == self.first.role:
                return self.first  # which refuses it, and says why
            raise Refusal(f"role {role!r} begins another conversation of the policy, and a key has one: {self.single}")
        if role not in self.frozen and self.trained == MOST:
            raise Refusal(
                f"an agent may hold {MOST} conversations, all of which are trained: continue one, or return; of "
                "this one nothing is sampled"
            )
        return Conversation(self.requests, self.rollout, role)

    def _begin(self, talk: Conversation, request: Request) -> None:
        if len(request.tokens) > self.longest:
            raise Refusal(
                f"the first request of another conversation has {len(request.tokens)} tokens, more than "
                f"{self.longest:.0f}: shorten its messages",
                code="context_length_exceeded",
            )
        seen = crc32("".join(image.sha256 for image in talk.images).encode())
        talk.branch = crc32(request.tokens.tobytes(), seen) % BRANCHES
        while talk.branch in self.conversations:
            talk.branch = (talk.branch + 1) % BRANCHES
        if talk.branch in self.expected:
            self.expected.remove(talk.branch)
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
        await self._wait(lambda: talk.request is not None)
        if self.outcome is not None and talk.request is not None:
            raise self.failure("returned while its request was unanswered: expected it to await each answer")
        return talk.request

    async def asking(self) -> list[Conversation]:
        """Return the conversations whose requests wait for a turn, once there are any; none after the agent's end."""

        def asked() -> list[Conversation]:
            return [each for each in self.conversations.values() if each.request is not None]

        await self._wait(lambda: bool(asked()))
        return asked() if self.outcome is None else []

    async def ended(self) -> None:
        # One that does nothing for too long is ended.
        try:
            await self._wait(lambda: False)
        except EnvironmentFailure as failure:
            if self.outcome is None:
                self.end(failure)

    async def _wait(self, there: Callable[[], bool]) -> None:
        while self.outcome is None and not there():
            news, idle = self._news, all(each.request is None for each in self.conversations.values())
            with anyio.move_on_after(self.timeout if idle else None) as waiting:
                await news.wait()
            if waiting.cancelled_caught:
                raise self.failure(
                    f"neither asked for anything nor returned within {self.timeout:g} s: raise the timeout, or see "
                    "what it waits for"
                )
        if isinstance(self.outcome, OppoError):
            raise self.outcome

    def end(self, outcome: Earned | OppoError) -> None:
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
