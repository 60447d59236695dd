"""Chat by a tokenizer's own template: the policy's turns as messages, and the messages after a turn as exact tokens.

The tokens after a turn are never found by rendering the conversation again, since templates rewrite earlier messages:
they drop reasoning, trim texts, put calls into another order. Instead a stand-in for the turn is rendered alone and
with the answer behind it. The answer is the text after the stand-in that only the second rendering has.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any, Final, TypeAlias

from oppo.errors import ConfigError, one_line
from oppo.events import Chunk, Finish
from oppo.hf.tokenizer import HfTokenizer, Rendered
from oppo.hf.tool_calls import (
    LAST_VALUE as _SAID,
    CallSyntax,
    ToolCall,
    ToolSchema,
    call_id,
    call_of,
    parameters_by_tool,
    probes,
    quoted,
    settled,
    tool_schema,
)
from oppo.models import Detokenize

ChatMessage: TypeAlias = Mapping[str, object]

_THOUGHT: Final = "THOUGHT0BY0THE0POLICY"
_USER: Final[ChatMessage] = {"role": "user", "content": "hello"}
_ANSWERED: Final[ChatMessage] = {"role": "assistant", "content": _SAID}


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    content: str
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    malformed: str = ""  # what is wrong with the first call that cannot be read
    text: str = field(default="", compare=False)  # all behind the reasoning, calls as written

    @property
    def message(self) -> ChatMessage:
        calls = [
            {"type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in self.tool_calls
        ]
        more = {"reasoning_content": self.reasoning, "tool_calls": calls}
        return {"role": "assistant", "content": self.content, **{key: each for key, each in more.items() if each}}


_OWN: Final = frozenset({"messages", "tools", "add_generation_prompt"})  # variables of a template that rendering sets


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
    """Parses the policy's turns by its chat template, and tokenizes the messages after a turn.

    Args:
        tokenizer: the policy's, with its chat template, the template's variables, and the tools that it shows.
        roles: of the messages that are said after a turn. The template is tried with each.

    Attributes:
        roles: those.
        tools: the JSON schemas of arguments, by the names of the tools that the tokenizer shows.
        ends: the tokens with which a policy ends its turn, where it follows the template.

    Raises:
        ConfigError: the tokenizer has no chat template, or this one does not show where the answer to a turn begins,
            or how a call is written.
    """

    def __init__(self, tokenizer: HfTokenizer, roles: Collection[str] = ("user",)) -> None:
        if not tokenizer.has_chat_template:
            raise ConfigError("the policy's tokenizer has no chat template: set data.chat_template")
        self._tokenizer = tokenizer
        self.roles = frozenset(roles)
        self.tools = parameters_by_tool(tokenizer.tools)
        self._content: str | None = ""
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

    def showing(self, tools: Collection[str]) -> ChatFormat:
        """Return the same with these of its tools, by name, and no others."""
        schemas = [each for each in self._tokenizer.tools if not parameters_by_tool([each]).keys().isdisjoint(tools)]
        shown = chatting(self._tokenizer, tools=schemas, variables=self._tokenizer.variables)
        return ChatFormat(shown, self.roles if tools else {*self.roles, "user"} - {"tool"})

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
            return ParsedTurn(text.strip(), reasoning, text=text.strip())
        content, calls, fault = self._syntax.read(text, self.tools)
        return ParsedTurn(content.strip(), reasoning, calls, fault, text.strip())

    def so_far(
        self,
        tokens: Sequence[int],
        stops: Sequence[str] = (),
        *,
        calls: bool = True,
        decode: Detokenize | None = None,
    ) -> tuple[str, str]:
        """Return the reasoning and the text of a turn that goes on, as far as no later token changes them.

        Args:
            tokens: of the turn so far.
            stops: texts that are left out where they end it.
            calls: whether calls are left out of the text.
            decode: that of the tokenizer, such as a :class:`~oppo.turns.GrowingText` of it.
        """
        if getattr(self._tokenizer.inner, "response_template", None) is not None:
            return "", ""
        reasoning, text = "", self._without_end(tokens, decode).rstrip("\ufffd")
        if self._thinking is not None:
            opening, closing, _ = self._thinking
            begun = self._opens or text.lstrip().startswith(opening)
            if not begun and opening.startswith(text.lstrip()):
                return "", ""
            thought = text if self._opens else text.lstrip().removeprefix(opening)
            if begun and closing not in thought:
                return settled(thought, [closing, *stops]).strip(), ""
            reasoning, text = self._split(text)
        text = self._syntax.before(text) if calls and self._syntax is not None else text
        return reasoning, settled(text, stops).strip()

    @cached_property
    def thinking(self) -> tuple[int, int, list[int]] | None:
        """The tokens that begin thinking, -1 if the prompt does, and end it, and all that end it in the template.

        ``None``: it has no token of its own for its end, or for its beginning.
        """
        if self._thinking is None:
            return None
        opening, closing, ending = map(self._tokenizer.encode_whole, self._thinking)
        if len(closing) != 1 or (len(opening) != 1 and not self._opens) or closing[0] not in ending:
            return None
        return -1 if self._opens else opening[0], closing[0], ending

    def thought(self, turn: Sequence[int]) -> int:
        """Return how many tokens of a turn are thinking, with those that begin and end it."""
        _, closing, _ = self._thinking or ("", "", "")
        return bisect_left(range(len(turn)), x=True, key=lambda n: closing in self._tokenizer.decode_whole(turn[:n]))

    def answer(self, turn: Sequence[int], messages: Sequence[ChatMessage]) -> list[int]:
        """Return the tokens that the policy reads after a turn: what closes it, messages, and the start of its next.

        Only the template writes special tokens; one that a message spells is ordinary text.

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

    def conversation(self, finish: Finish) -> list[ChatMessage]:
        """Return a response as messages: each turn with its reasoning and calls, and between them the answers.

        An answer that does not say its messages is one message of a tool, with all of its text.
        """
        found, answers = list[ChatMessage](), (turn.said for turn in finish.answered)
        for piece in finish.response.pieces():
            tokens = piece.tokens.tolist()
            if isinstance(piece, Chunk):
                found.append(self.parse(tokens).message)
            else:
                text = self._tokenizer.decode_whole(tokens)
                found += next(answers, ()) or [{"role": "tool", "name": "tool", "content": text}]
        return found

    def _answer(self, messages: Sequence[ChatMessage]) -> Rendered:
        answers = [each for each in messages if each["role"] == "tool"]
        said = _ANSWERED
        if answers:
            answers = [
                {"name": "tool", **each, "tool_call_id": call_id(each.get("tool_call_id"), at)}
                for at, each in enumerate(answers)
            ]
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
                f"{_WHOSE} ends a message with {quoted(self._close)}, but one with a call with {quoted(shared)}: "
                "expected one ending for both"
            )
        return whole.after(len(whole.text) - len(following) + len(shared) - len(self._close))

    def _shared(self, ending: str, following: str, role: str) -> str:
        end = str(self._tokenizer.inner.eos_token or "")
        for each in (ending, ending.removesuffix(end)):  # some end the whole text with it, after any role
            if following.startswith(each):
                return each
        raise ConfigError(
            f"{_WHOSE} renders {quoted(ending)} after an assistant's last message, and {quoted(following)} where one "
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
            f"{_WHOSE} ends an assistant's message with {quoted(rendered.text[:80])}, where no special token is, so "
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
        made = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in calls
        ]
        return {"role": "assistant", "content": self._content, "tool_calls": made}

    def _call_syntax(self) -> CallSyntax | None:
        refusal: Exception | None = None
        for self._content in ("", None):
            try:
                one = self._written(probes(1))
                break
            except ConfigError as error:
                refusal = refusal or error
        else:
            raise ConfigError(f"tools need a template that renders calls: {refusal}") from refusal
        found = CallSyntax.of(self._written)
        if found is None and getattr(self._tokenizer.inner, "response_template", None) is None:
            raise ConfigError(
                f"{_WHOSE} writes a call as {quoted(one)}, none of the forms that can be read: a JSON object, "
                "a name with a JSON object of arguments, or a name with arguments one by one between marks; give the "
                "tokenizer a response_template"
            )
        return found

    def _written(self, calls: Sequence[ToolCall]) -> str:
        # The marks of a template around tool calls.
        plain, text = (self._render([_USER, each]).text for each in (_ANSWERED, self._calling(calls)))
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(plain, text, strict=False)))
        start = len(re.sub(r"[<\[][^<>\[\]]*$", "", text[:same]))  # not within a mark
        if not text.endswith(self._ending) or any(call.name not in text for call in calls):
            raise ConfigError(
                f"{_WHOSE} writes a call as {quoted(text[start:])}: expected it before {quoted(self._ending)}"
            )
        return text[start:].removesuffix(self._ending)

    @cached_property
    def _thinking(self) -> tuple[str, str, str] | None:
        # The marks that begin and end reasoning, and the text from its end to the answer.
        try:
            text = self._render([_USER, {"role": "assistant", "content": _SAID, "reasoning_content": _THOUGHT}]).text
        except ConfigError:
            text = ""
        before, found, after = text.partition(_THOUGHT)
        opening = re.search(r"(<[^<>]*>|\[[^\[\]]*\])\s*$", before)
        closing = after.partition(_SAID)[0].strip()
        if found and opening and closing and _SAID in after:
            return opening[1], closing, after.partition(_SAID)[0]
        return ("<think>", "</think>", "\n</think>\n\n") if "</think>" in self._tokenizer.chat_template else None

    @property
    def _opens(self) -> bool:
        # Whether the prompt begins the reasoning.
        return self._thinking is not None and self._opened.rstrip().endswith(self._thinking[0])

    def _split(self, text: str) -> tuple[str, str]:
        if self._thinking is None:
            return "", text
        opening, closing, _ = self._thinking
        if not self._opens:
            if not text.lstrip().startswith(opening):
                return "", text
            text = text.lstrip().removeprefix(opening)
        reasoning, _, rest = text.partition(closing)
        return reasoning.strip(), rest

    def _without_end(self, tokens: Sequence[int], decode: Detokenize | None = None) -> str:
        kept = list(tokens)
        if kept and kept[-1] in self._tokenizer.control_ids:
            end = self._tokenizer.decode_whole(kept[-1:])
            if self._syntax is None or not self._syntax.ends_with(end):
                kept.pop()
        return (decode or self._tokenizer.decode_whole)(kept).removesuffix(self._close.strip() or "\0")

    def _parsed_by_template(self, tokens: list[int]) -> ParsedTurn:
        inner: Any = self._tokenizer.inner
        try:
            found = inner.parse_response(tokens, prefix=self._opened, tools=list(self._tokenizer.tools) or None)
            made = [each.get("function", each) for each in found.get("tool_calls") or ()]
            calls = tuple(call_of(each["name"], each.get("arguments"), each.get("id")) for each in made)
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
            f"assistant's message, which is {quoted(header)}; set data.chat_template to one that does"
        )


_WHOSE: Final = "the chat template of the policy's tokenizer"


def _behind(text: str, count: int) -> str:
    # The text after the stand-in, which occurs ``count`` times; later text may spell it, too.
    return text.split(_SAID, count)[-1]
