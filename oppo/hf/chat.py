"""Chat by a tokenizer's own template: what a policy said as a message, and what is said after a turn as exact tokens.

What a response reads after a turn is never found by rendering the conversation again, since templates rewrite what was
said before: they drop reasoning, trim texts, put calls into another order. Instead a stand-in for the turn is rendered
alone and with the answer behind it. What the second has after the stand-in, and the first has not, is the answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import takewhile
from typing import Any, Final, TypeAlias

from transformers.utils.chat_template_utils import get_json_schema

from oppo.errors import ConfigError, one_line, shortened, shown
from oppo.events import Chunk, Response
from oppo.hf.tokenizer import HfTokenizer, Rendered

ChatMessage: TypeAlias = Mapping[str, object]
ToolSchema: TypeAlias = Mapping[str, Any]
"""``{"type": "function", "function": {"name", "description", "parameters"}}``, as chat templates read it."""

_SAID: Final = "SAID0BY0THE0POLICY"
_THOUGHT: Final = "THOUGHT0BY0THE0POLICY"
_USER: Final[ChatMessage] = {"role": "user", "content": "hello"}
_ANSWERED: Final[ChatMessage] = {"role": "assistant", "content": _SAID}
_PROBE: Final = {"FIRST0KEY": "FIRST0VALUE", "SECOND0KEY": _SAID}
_NAME: Final = re.compile(r"[\w.\-]+")
_ID: Final = "call{:05}"
"""Of nine letters and digits, as Mistral's templates ask for."""

_JSON: Final = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that a turn makes; ``id`` is empty where it gives none."""

    name: str
    arguments: Mapping[str, object]
    id: str = ""


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """A turn as a message.

    Attributes:
        content: its text, without reasoning, calls and what ends it.
        reasoning: what stands between the template's marks of reasoning.
        tool_calls: in their order.
        malformed: what is wrong with the first call that cannot be read; empty if there is none.
    """

    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str = ""

    @property
    def message(self) -> ChatMessage:
        """The turn as chat templates read it; reasoning and calls where there are some."""
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        more = {"reasoning_content": self.reasoning, "tool_calls": calls}
        return {"role": "assistant", "content": self.content, **{key: each for key, each in more.items() if each}}


def tool_schema(function: Callable[..., object]) -> ToolSchema:
    """Return the schema of a tool, of its type hints and its docstring in Google's style, or its own as ``schema``.

    Raises:
        ConfigError: it lacks one of them.
    """
    if isinstance(own := getattr(function, "schema", None), Mapping):
        return own
    try:
        schema: ToolSchema = get_json_schema(function)
    except Exception as error:  # any kind: the library raises several
        name = getattr(function, "__name__", repr(function))
        raise ConfigError(
            f"tool {name!r} cannot be shown to the policy: {one_line(error)}; expected a type hint for each argument, "
            "and a docstring that describes the tool and, under 'Args:', each argument"
        ) from error
    return schema


_OWN: Final = frozenset({"messages", "tools", "add_generation_prompt"})
"""Variables of a template that rendering sets."""


def chatting(
    tokenizer: HfTokenizer,
    *,
    template: str = "",
    tools: Sequence[ToolSchema | Callable[..., object]] = (),
    variables: Mapping[str, object] | None = None,
) -> HfTokenizer:
    """Return a tokenizer that renders chats by a template with tools and variables.

    Args:
        tokenizer: the one that is changed.
        template: empty: its own.
        tools: that it shows: functions with type hints and docstrings, or schemas.
        variables: of the template.

    Raises:
        ConfigError: the template does not read them, or there is none.
    """
    if template:
        tokenizer.inner.chat_template = template
    schemas = [tool if isinstance(tool, Mapping) else tool_schema(tool) for tool in tools]
    made = HfTokenizer(tokenizer.inner, tokenizer.beside, tools=schemas, variables=variables)
    if not (template or made.tools or made.variables):
        return made
    if not made.has_chat_template:
        raise ConfigError("the policy's tokenizer has no chat template that reads them: set data.chat_template")
    read = made.template_variables()
    if template:
        _check_generation_prompt(made)
    if unread := sorted(made.variables.keys() - (read - _OWN)):
        raise ConfigError(
            f"data.chat_template_kwargs: {_WHOSE} does not read {unread[0]!r}; the variables that can be set are "
            f"{', '.join(sorted(read - _OWN)) or '(none)'}"
        )
    if made.tools and "tools" not in read:
        raise ConfigError(
            f"{_WHOSE} shows no tools: set data.chat_template to one that reads `tools`, or leave them out"
        )
    return made


class ChatFormat:
    """Reads what a policy said by its chat template, and tokenizes what is said after that.

    Args:
        tokenizer: the policy's, with its chat template, the template's variables, and the tools that it shows.
        roles: of the messages that are said after a turn. The template is tried with each.

    Attributes:
        roles: those.
        tools: the names of tools that the tokenizer shows.
        ends: the tokens with which a policy ends what it says, where it follows the template.

    Raises:
        ConfigError: the tokenizer has no chat template, or with this one it cannot be told what is said after a turn,
            or how a call is written.
    """

    def __init__(self, tokenizer: HfTokenizer, roles: Collection[str] = ("user",)) -> None:
        if not tokenizer.has_chat_template:
            raise ConfigError("the policy's tokenizer has no chat template: set data.chat_template")
        self._tokenizer = tokenizer
        self.roles = frozenset(roles)
        self.tools = [_named(tool) for tool in tokenizer.tools]
        self._style: tuple[str | None, bool] = ("", False)
        self._ending = self._close = ""
        alone = self._render([_USER, _ANSWERED])
        self._ending = _behind(alone.text, alone.text.count(_SAID))
        prompt = self._render([_USER], goes_on=True)
        _check_generation_prompt(tokenizer)
        self._opened = prompt.text
        following = self._render([_USER, _ANSWERED, _USER], goes_on=True)
        self._close = self._shared(self._ending, _behind(following.text, alone.text.count(_SAID)), "user")
        for tool in self.tools:
            if tool not in prompt.text:
                raise ConfigError(
                    f"{_WHOSE} does not show the policy its tools: {tool!r} is not in what it renders; set "
                    "data.chat_template to one that renders `tools`"
                )
        self._syntax = self._call_syntax() if "tool" in roles else None
        self.ends = frozenset(self._end(role) for role in roles)

    @property
    def tokenizer(self) -> HfTokenizer:
        """The policy's, which shows the tools."""
        return self._tokenizer

    def parse(self, tokens: Sequence[int]) -> ParsedTurn:
        """Return a turn as a message; a call that cannot be read is reported, never raised.

        Args:
            tokens: of the turn, with the one that ends it.
        """
        inner = self._tokenizer.inner
        if getattr(inner, "response_template", None) is not None:
            return self._parsed_by_template(list(tokens))
        text = self._without_end(tokens)
        reasoning, text = self._split(text)
        if self._syntax is None:
            return ParsedTurn(text.strip(), reasoning)
        content, calls, fault = self._syntax.read(text, self._types)
        return ParsedTurn(content.strip(), reasoning, calls, fault)

    def answer(self, turn: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens that the policy reads after a turn: what closes it, messages, and the start of its next.

        Special tokens are those of the template; one that a message spells is ordinary text.

        Args:
            turn: the tokens of the turn; what closes it is left out where it did so itself.
            messages: of users or of tools; the latter answer as many calls.

        Raises:
            ConfigError: the template does not render them.
        """
        rendered = self._answer(messages)
        tokens = self._tokenizer.encode_rendered(rendered)
        closing = len(self._tokenizer.encode_whole(self._close)) + 1
        ended = turn[-1] if len(turn) and turn[-1] in self._tokenizer.control_ids else None
        return tokens[tokens.index(ended) + 1 :] if ended in tokens[:closing] else tokens

    def conversation(self, response: Response) -> list[ChatMessage]:
        """Return a response as messages: each turn with its reasoning and calls, and the answers of tools between.

        What stands behind a turn and is no answer to calls is one message of a tool.
        """
        found, turn = list[ChatMessage](), ParsedTurn("")
        for piece in response.pieces():
            tokens = piece.tokens.tolist()
            if isinstance(piece, Chunk):
                turn = self.parse(tokens)
                found.append(turn.message)
                continue
            names = [call.name for call in turn.tool_calls] + ["tool"] * bool(turn.malformed or not turn.tool_calls)
            said = self._contents(names, self._tokenizer.decode_whole(tokens))
            found += [{"role": "tool", "name": name, "content": text} for name, text in zip(names, said, strict=False)]
        return found

    def _contents(self, names: Sequence[str], text: str) -> list[str]:
        # What tools of these names answered: what stands in a rendered answer where stand-ins would.
        marks = [f"ANSWER{at}TO0THE0POLICY" for at in range(len(names))]
        answers = [{"role": "tool", "name": name, "content": mark} for name, mark in zip(names, marks, strict=True)]
        with suppress(ConfigError):  # a name that its template does not render
            before, *between = re.split("|".join(marks), self._answer(answers).text)
            start = next(at for at in range(len(before) + 1) if text.startswith(before[at:]))  # a turn closes itself
            whole = re.escape(before[start:]) + "".join(f"(.*?){re.escape(each)}" for each in between)
            if match := re.fullmatch(whole, text, re.DOTALL):
                return list(match.groups())
        return [text]

    def _answer(self, messages: Sequence[ChatMessage]) -> Rendered:
        answers = [each for each in messages if each["role"] == "tool"]
        said = _ANSWERED
        if answers:
            answers = [{"name": "tool", **each, "tool_call_id": _id(each, at)} for at, each in enumerate(answers)]
            said = self._calling(
                [
                    ToolCall(str(each["name"]), {"x": _SAID if each is answers[-1] else ""}, str(each["tool_call_id"]))
                    for each in answers
                ]
            )
            messages = [*answers, *(each for each in messages if each["role"] != "tool")]
        alone = self._render([_USER, said]).text
        whole = self._render([_USER, said, *messages], goes_on=True)
        count = alone.count(_SAID)
        ending, following = _behind(alone, count), _behind(whole.text, count)
        shared = self._shared(ending, following, str(messages[0]["role"]))
        if not shared.endswith(self._close):
            raise ConfigError(
                f"{_WHOSE} ends a message with {_quoted(self._close)}, but one with a call with {_quoted(shared)}: "
                "expected one ending for both"
            )
        return whole.after(len(whole.text) - len(following) + len(shared) - len(self._close))

    def _shared(self, ending: str, following: str, role: str) -> str:
        end = str(self._tokenizer.inner.eos_token or "")
        for each in (ending, ending.removesuffix(end)):  # some end the whole text with it, whoever spoke last
            if following.startswith(each):
                return each
        raise ConfigError(
            f"{_WHOSE} renders {_quoted(ending)} after an assistant's last message, and {_quoted(following)} where one "
            f"of role {role!r} follows, so that it cannot be told what the latter adds: set data.chat_template to one "
            "that renders the same text before what is added"
        )

    def _end(self, role: str) -> int:
        said = "ANSWER0TO0THE0POLICY"
        rendered = self._answer([{"role": role, "content": said}])
        if said not in rendered.text:
            raise ConfigError(
                f"{_WHOSE} leaves out messages of role {role!r}: set data.chat_template to one that has them"
            )
        begun = self._tokenizer.encode_rendered(rendered)[: len(self._tokenizer.encode_whole(self._close)) + 1]
        for token in begun:
            if token in self._tokenizer.control_ids:
                return token
        raise ConfigError(
            f"{_WHOSE} ends an assistant's message with {_quoted(rendered.text[:80])}, where no special token is, so "
            "that its tokens depend on the text before: set data.chat_template to one that ends it with a special token"
        )

    def _render(self, messages: Sequence[ChatMessage], *, goes_on: bool = False) -> Rendered:
        try:
            rendered = self._tokenizer.rendered(messages, answered=not goes_on)
        except Exception as error:  # any kind: a template is a program
            roles = ", ".join(
                f"{each['role']} (calls)" if "tool_calls" in each else str(each["role"]) for each in messages
            )
            raise ConfigError(f"{_WHOSE} cannot render messages of {roles}: {one_line(error)}") from error
        if any(_SAID in str(each) for each in messages) and _SAID not in rendered.text:
            raise ConfigError(f"{_WHOSE} leaves out what an assistant's message says")
        return rendered

    def _calling(self, calls: Sequence[ToolCall]) -> ChatMessage:
        content, as_text = self._style
        made = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.dumps(call.arguments) if as_text else call.arguments},
            }
            for call in calls
        ]
        return {"role": "assistant", "content": content, "tool_calls": made}

    def _call_syntax(self) -> _Syntax | None:
        refusal: Exception | None = None
        for self._style in (("", False), (None, False), ("", True), (None, True)):
            try:
                one = self._written(1)
                break
            except ConfigError as error:
                refusal = refusal or error
        else:
            raise ConfigError(f"tools need a template that renders calls: {refusal}") from refusal
        try:
            two = self._written(2)
        except ConfigError:  # there is one call in a message at most
            two = ""
        found = _Syntax.of(one, two, self._written(0))
        if found is None and getattr(self._tokenizer.inner, "response_template", None) is None:
            raise ConfigError(
                f"{_WHOSE} writes a call as {_quoted(one)}, none of the forms that can be read: a JSON object, "
                "a name with a JSON object of arguments, or a name with arguments one by one between marks; give the "
                "tokenizer a response_template"
            )
        return found

    def _written(self, count: int) -> str:
        # What a template writes for calls; of none, for one without arguments.
        calls = [ToolCall(f"PROBE0NAME{at}", dict(_PROBE), _ID.format(at)) for at in range(count)]
        calls = calls or [ToolCall("PROBE0NAME0", {}, _ID.format(0))]
        plain, text = (self._render([_USER, each]).text for each in (_ANSWERED, self._calling(calls)))
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, text, strict=False)))
        start = len(re.sub(r"[<\[][^<>\[\]]*$", "", text[:same]))  # not within a mark
        if not text.endswith(self._ending) or any(call.name not in text for call in calls):
            raise ConfigError(
                f"{_WHOSE} writes a call as {_quoted(text[start:])}: expected it before {_quoted(self._ending)}"
            )
        return text[start:].removesuffix(self._ending)

    @cached_property
    def _types(self) -> Mapping[tuple[str, str], object]:
        # The type of each argument of each tool.
        tools = [each.get("function", each) for each in self._tokenizer.tools]
        return {
            (str(tool["name"]), key): kind.get("type")
            for tool in tools
            for key, kind in tool.get("parameters", {}).get("properties", {}).items()
        }

    @cached_property
    def _thinking(self) -> tuple[str, str] | None:
        # What begins and ends reasoning.
        try:
            text = self._render([_USER, {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT}]).text
        except ConfigError:
            text = ""
        before, found, after = text.partition(_THOUGHT)
        opening = re.search(r"(<[^<>]*>|\[[^\[\]]*\])\s*$", before)
        closing = after.partition(_SAID)[0].strip()
        if found and opening and closing and _SAID in after:
            return opening[1], closing
        return ("<think>", "</think>") if "</think>" in self._tokenizer.chat_template else None

    def _split(self, text: str) -> tuple[str, str]:
        if self._thinking is None:
            return "", text
        opening, closing = self._thinking
        if not self._opened.rstrip().endswith(opening):
            if not text.lstrip().startswith(opening):
                return "", text
            text = text.lstrip().removeprefix(opening)
        reasoning, _, rest = text.partition(closing)
        return reasoning.strip(), rest

    def _without_end(self, tokens: Sequence[int]) -> str:
        kept = list(tokens)
        if kept and kept[-1] in self._tokenizer.control_ids:
            end = self._tokenizer.decode_whole(kept[-1:])
            if self._syntax is None or not self._syntax.ends_with(end):
                kept.pop()
        return self._tokenizer.decode_whole(kept).removesuffix(self._close.strip() or "\0")

    def _parsed_by_template(self, tokens: list[int]) -> ParsedTurn:
        inner: Any = self._tokenizer.inner
        try:
            found = inner.parse_response(tokens, prefix=self._opened, tools=list(self._tokenizer.tools) or None)
            made = [each.get("function", each) for each in found.get("tool_calls") or ()]
            calls = tuple(_call(each["name"], each.get("arguments"), each.get("id")) for each in made)
            thought = found.get("reasoning_content") or found.get("thinking") or found.get("reasoning") or ""
            return ParsedTurn(str(found.get("content") or ""), str(thought), calls)
        except Exception as error:  # noqa: BLE001 - whatever the policy wrote
            return ParsedTurn(self._tokenizer.decode(tokens), malformed=one_line(error))


def _check_generation_prompt(tokenizer: HfTokenizer) -> None:
    try:
        prompt, closed = (tokenizer.rendered([_USER], answered=each).text for each in (False, True))
        whole = tokenizer.rendered([_USER, _ANSWERED], answered=True).text
    except Exception:  # noqa: BLE001 - a template is a program; a prompt that it cannot render says why
        return
    header = whole.removeprefix(closed).partition(_SAID)[0]
    if prompt == closed and whole.startswith(closed) and header.strip():  # Mistral's, for one, have none
        raise ConfigError(
            f"{_WHOSE} has no generation prompt: with add_generation_prompt it renders nothing that begins the "
            f"assistant's message, which is {_quoted(header)}; set data.chat_template to one that does"
        )


_WHOSE: Final = "the chat template of the policy's tokenizer"


def _quoted(text: str) -> str:
    return shortened(repr(text), 120)


def _behind(text: str, count: int) -> str:
    # What stands behind the stand-in, which occurs so many times; what comes later may spell it, too.
    return text.split(_SAID, count)[-1]


def _named(tool: ToolSchema) -> str:
    return str(tool.get("function", tool).get("name"))


def _id(answer: ChatMessage, at: int) -> str:
    given = str(answer.get("tool_call_id") or "")
    return given if re.fullmatch(r"[a-zA-Z0-9]{9}", given) else _ID.format(at)


def _call(name: object, arguments: object, number: object = "") -> ToolCall:
    if isinstance(arguments, str):
        arguments = json.loads(arguments or "{}")
    if not isinstance(name, str) or not name:
        raise ValueError(f"the name of a tool is a text, got {shown(name)}")
    if not isinstance(arguments or {}, dict):
        raise ValueError(  # noqa: TRY004 - as of what is no JSON
            f"the arguments of a call are a JSON object, got {shown(arguments)}"
        )
    return ToolCall(name, arguments or {}, str(number or ""))  # type: ignore[arg-type] # checked


def _flexible(literal: str) -> re.Pattern[str]:
    # Matches a literal however much white space is around its words.
    return re.compile(r"\s*" + "".join(rf"{re.escape(word)}\s*" for word in literal.split()))


Reading: TypeAlias = tuple[ToolCall, int]
"""A call, and where it ends in the text."""

Types: TypeAlias = Mapping[tuple[str, str], object]
"""The JSON type of each argument of each tool."""


@dataclass(frozen=True, slots=True)
class _Object:
    """A call that is a JSON object, which has the tool's name and its arguments under these keys."""

    name: str
    arguments: str

    def read(self, text: str, at: int, types: Types) -> Reading:
        del types
        found, end = _JSON.raw_decode(text, at)
        if not isinstance(found, dict) or self.name not in found:
            raise ValueError(f"expected a JSON object with {self.name!r} and {self.arguments!r}, got {shown(found)}")
        return _call(found[self.name], found.get(self.arguments), found.get("id")), end


@dataclass(frozen=True, slots=True)
class _Named:
    """A call that is a name, this text, and a JSON object of arguments."""

    between: str

    def read(self, text: str, at: int, types: Types) -> Reading:
        del types
        name = _NAME.match(text, at)
        begins = _flexible(self.between).match(text, name.end()) if name else None
        if name is None or begins is None:
            raise ValueError(f"expected the name of a tool and {self.between!r}, got {_quoted(text[at : at + 80])}")
        found, end = _JSON.raw_decode(text, begins.end())
        return _call(name[0], found), end


@dataclass(frozen=True, slots=True)
class _Marked:
    """A call that is a name and its arguments one by one, between marks.

    Attributes:
        first: before the first key.
        value: between a key and its value.
        following: between a value and the next key.
        last: after the last value.
    """

    first: str
    value: str
    following: str
    last: str

    def read(self, text: str, at: int, types: Types) -> Reading:
        name = _NAME.match(text, at)
        if name is None:
            raise ValueError(f"expected the name of a tool, got {_quoted(text[at : at + 80])}")
        marks = {re.sub(r"^(\s+)", "", each).split()[0]: each for each in (self.following, self.last)}
        spaces = "|".join(
            rf"(?:{re.escape(each[: each.index(mark)])})?{re.escape(mark)}" for mark, each in marks.items()
        )
        argument = re.compile(rf"(?P<key>[^\n]*?){re.escape(self.value)}(?P<value>(?s:.*?))(?={spaces})")
        at, found = name.end(), dict[str, object]()
        begins = _flexible(self.first).match(text, at)
        while begins is not None:
            part = argument.match(text, begins.end())
            if part is None:
                raise ValueError(
                    f"expected an argument of {name[0]!r}, {self.value!r}, its value and {self.last!r}, got "
                    f"{_quoted(text[begins.end() : begins.end() + 80])}"
                )
            key, at = part["key"].strip(), part.end()
            found[key] = _typed(part["value"], types.get((name[0], key)))
            begins = _flexible(self.following).match(text, at)
        return ToolCall(name[0], found), at


def _typed(text: str, kind: object) -> object:
    if kind == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


@dataclass(frozen=True, slots=True)
class _Syntax:
    """How a template writes calls.

    Attributes:
        head: before the first call.
        form: of a call.
        between: between two calls; empty if a message has one at most.
        tails: behind the last call; a call without arguments may have another.
    """

    head: str
    form: _Object | _Named | _Marked
    between: str
    tails: tuple[str, ...]

    @classmethod
    def of(cls, one: str, two: str, bare: str) -> _Syntax | None:
        """Return the syntax of which ``one``, ``two`` and ``bare`` are one call, two, and one without arguments."""
        if (unit := _unit(one, 0)) is None:
            return None
        (start, stop), form = unit
        between, tails = "", [one[stop:]]
        if two:
            first, second = _unit(two, 0), _unit(two, 1)
            if first is None or second is None:
                return None
            between = two[first[0][1] : second[0][0]]
        if isinstance(form, _Marked):
            tails.append(bare.partition("PROBE0NAME0")[2])
        if not one[:start].strip() and not isinstance(form, _Object):
            return None  # a name that nothing stands before might be any word
        return cls(one[:start], form, between, tuple(tails))

    def ends_with(self, end: str) -> bool:
        """Return whether a special token belongs to a call."""
        return any(tail.rstrip().endswith(end) for tail in self.tails)

    def read(self, text: str, types: Types) -> tuple[str, tuple[ToolCall, ...], str]:
        """Return the text outside of calls, the calls up to one that cannot be read, and what is wrong with that."""
        head = _flexible(self.head)
        if isinstance(self.form, _Object) and not self.head.strip():
            head = re.compile(rf"\A\s*(?=\{{\s*\"{re.escape(self.form.name)}\")")
        content, calls, at = "", list[ToolCall](), 0
        while (begins := head.search(text, at)) is not None:
            content, at, more = content + text[at : begins.start()], begins.end(), True
            try:
                while more:
                    call, at = self.form.read(text, at, types)
                    at, more = self._end(text, at)
                    calls.append(call)
            except (ValueError, RecursionError) as error:
                return content, tuple(calls), f"{one_line(error)}, in {_quoted(text[begins.start() :])}"
        return content + text[at:], tuple(calls), ""

    def _end(self, text: str, at: int) -> tuple[int, bool]:
        between = self.between and _flexible(self.between).match(text, at)
        if between:
            return between.end(), True
        for tail in self.tails:
            if ends := _flexible(tail).match(text, at):
                return ends.end(), False
        raise ValueError(f"expected {self.tails[0]!r} after a call, got {_quoted(text[at : at + 80])}")


def _unit(text: str, number: int) -> tuple[tuple[int, int], _Object | _Named | _Marked] | None:
    # Where a call of _PROBE stands in what a template wrote, and its form.
    name = f"PROBE0NAME{number}"
    at = text.find(name)
    for start in (found.start() for found in reversed(list(re.finditer(r"\{", text[: max(at, 0)])))):
        with suppress(ValueError):
            value, end = _JSON.raw_decode(text, start)
            keys = {_key_of(value, name), _key_of(value, _PROBE), _key_of(value, json.dumps(_PROBE))} - {""}
            if len(keys) == 2:
                own = _key_of(value, name)
                return (start, end), _Object(own, (keys - {own}).pop())
    brace = text.find("{", at)
    with suppress(ValueError):
        value, end = _JSON.raw_decode(text, max(brace, 0))
        if value == _PROBE:
            return (at, end), _Named(text[at + len(name) : brace])
    texts = [name, *(each for pair in _PROBE.items() for each in pair)]
    places = [at, *(text.find(each, at) for each in texts[1:])]
    if min(places) < 0 or places != sorted(places):
        return None
    ends = [place + len(each) for place, each in zip(places, texts, strict=True)]
    first, value, following, again = (text[end:place] for end, place in zip(ends, places[1:], strict=False))
    last = text[ends[-1] :]
    quoted = {*value, *following}.intersection("\"'")  # of one language or another
    if quoted or value != again or not all(each.strip() for each in (first, value, following, last)):
        return None
    return (at, ends[-1]), _Marked(first, value, following, last)


def _key_of(found: object, value: object) -> str:
    return next((key for key, each in found.items() if each == value), "") if isinstance(found, dict) else ""
