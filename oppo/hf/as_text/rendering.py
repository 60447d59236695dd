"""A rollout as the text that a reward model reads, in one of several forms, and as the tokens of that model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal, TypeAlias

from oppo.data.prompts import Message
from oppo.errors import ConfigError, ModelError, one_line
from oppo.events import Prompt
from oppo.hf.tokenizer import HfTokenizer, Rendered

Form: TypeAlias = Literal["chat", "joined", "pair", "response"]
"""The model's own chat template; one text after the other; two segments; the response alone."""

PromptText: TypeAlias = str | Sequence[Message]

_MARK: Final = "RESPONSE0OF0THE0POLICY"  # stands for the response where the text before it is wanted


class Rendering:
    """Renders rollouts for one model; a special token that a response or a message spells is ordinary text.

    ``form``: ``chat``: the model's chat template, the response as the assistant's message or behind its last one, a
    plain prompt as the user's; ``joined``: prompt text and response, contents of chat messages with a blank line after
    each; ``pair``: the same as two segments; ``response``: the response alone.
    """

    def __init__(self, form: Form, reader: HfTokenizer) -> None:
        if form == "chat" and not reader.has_chat_template:
            raise ConfigError(
                "its tokenizer has no chat template, so prompt and response cannot be rendered by one: choose another "
                "form (joined, pair or response)"
            )
        self.form: Form = form
        self._reader = reader

    def whole(self, prompt: PromptText, response: str) -> Rendered:
        match self.form:
            case "chat":
                return self._chat(prompt, response)
            case "joined":
                text = plain(prompt)
                data = (len(text) if isinstance(prompt, str) else 0, len(text) + len(response))
                return Rendered(text + response, data=[data])
            case "pair":
                text = plain(prompt)
                return Rendered(text, response, data=[(0, len(text))])
            case "response":
                return Rendered(response, data=[(0, len(response))])

    def opening(self, prompt: PromptText) -> Rendered | None:
        """Return the text before the response; ``None`` if it depends on the response."""
        match self.form:
            case "chat":
                rendered = self._chat(prompt, _MARK)
                opening, *rest = rendered.text.split(_MARK)
                return replace(rendered, text=opening) if len(rest) == 1 else None
            case "joined" | "response":
                return self.whole(prompt, "")
            case "pair":
                return None

    def closing(self) -> str:
        return self.whole("hello", _MARK).text.rpartition(_MARK)[2]

    def _chat(self, prompt: PromptText, response: str) -> Rendered:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        answer: Message = {"role": "assistant", "content": response}
        if messages and messages[-1].get("role") == "assistant":
            begun = messages.pop()
            answer = {**begun, "content": content(begun) + response}
        try:
            return self._reader.rendered([*messages, answer], answered=True)
        except Exception as error:  # any kind: a template is a program
            raise ConfigError(f"its chat template cannot render the messages of a prompt: {one_line(error)}") from error


def prompt_text(prompt: Prompt, column: str, decode: Callable[[Sequence[int]], str]) -> PromptText:
    """Return a prompt as its data has it in ``column``, text or chat messages; without that, its decoded tokens."""
    found = prompt.columns.get(column)
    if isinstance(found, str):
        return found
    if isinstance(found, list) and found and all(isinstance(each, dict) for each in found):
        return found
    return decode(prompt.tokens.tolist())


def plain(prompt: PromptText) -> str:
    if isinstance(prompt, str):
        return prompt
    text = "".join(f"{content(message)}\n\n" for message in prompt)
    return text.removesuffix("\n\n") if prompt and prompt[-1].get("role") == "assistant" else text


def content(message: Message) -> str:
    found = message.get("content")
    parts = found if isinstance(found, list) else [{"text": found or ""}]
    return "".join(str(part.get("text", "")) for part in parts)


OverLong: TypeAlias = Literal["error", "drop", "truncate"]
"""A rollout that is longer than the model reads ends the run, is dropped, or is cut as the tokenizer cuts."""


EMPTY: Final = "the reward model has nothing to read: the text has no token"
"""Reason of a drop for a rollout without text."""


class TooLong(Exception):  # noqa: N818 - it says what happened
    """A text has more tokens than the model reads."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """The first tokens of a text that goes on, and where in the text each ends, in characters."""

    ids: Sequence[int]
    ends: Sequence[int]


class TextReader:
    """Turns text into a model's tokens, at most ``limit``; longer texts are refused, or cut as the tokenizer cuts."""

    def __init__(self, tokenizer: HfTokenizer, limit: int, over_long: OverLong = "error") -> None:
        self.tokenizer = tokenizer
        self.limit = limit
        self.over_long: OverLong = over_long

    @property
    def knows_offsets(self) -> bool:
        return bool(self.tokenizer.inner.is_fast)

    def features(self, rendered: Rendered) -> Mapping[str, list[int]]:
        cut = self.over_long == "truncate"
        segments = self.tokenizer.segments(rendered)
        if len(segments) > 1:
            features = self._of_segments(rendered)
        else:
            found = self.tokenizer.inner(
                rendered.text,
                rendered.pair,
                add_special_tokens=rendered.special,
                split_special_tokens=segments[0][1],
                truncation=cut,
                max_length=self.limit if cut else None,
                verbose=False,
            )
            features = {name: list(row) for name, row in found.items()}
        if (length := len(features["input_ids"])) > self.limit:
            raise TooLong(f"has {length} tokens as text, more than the {self.limit} that the reward model reads")
        return features

    def refused(self, rollout: int, error: TooLong, model: str) -> str:
        # Why it is dropped; unless such rollouts are, the run ends.
        if self.over_long == "drop":
            return f"it {error}"
        raise ModelError(
            f"rollout {rollout} {error}, a {model}: shorten the prompts, lower max_new_tokens, or have such rollouts "
            "dropped or cut (over_long, rewards.N.over_long)"
        ) from error

    def _of_segments(self, rendered: Rendered) -> dict[str, list[int]]:
        inner = self.tokenizer.inner
        before, after = self.tokenizer.around if rendered.special else ([], [])
        ids = self.tokenizer.encode_rendered(rendered)
        if self.over_long == "truncate":
            room = max(0, self.limit - len(before) - len(after))
            ids = ids[max(0, len(ids) - room) :] if inner.truncation_side == "left" else ids[:room]
        row = [*before, *ids, *after]
        filled = {"attention_mask": 1, "token_type_ids": 0}
        return {"input_ids": row} | {
            name: [value] * len(row) for name, value in filled.items() if name in inner.model_input_names
        }

    def pieces(self, rendered: Rendered) -> Pieces:
        # of a beginning or a part of a text, without special tokens after it
        ids: list[int] = []
        ends: list[int] = []
        length = 0
        for number, (text, data) in enumerate(self.tokenizer.segments(rendered)):
            found = self.tokenizer.inner(
                text,
                add_special_tokens=rendered.special and not number,
                split_special_tokens=data,
                return_offsets_mapping=True,
                return_special_tokens_mask=True,
                verbose=False,
            )
            added, count = found["special_tokens_mask"], len(found["input_ids"])
            while count and added[count - 1]:
                count -= 1
            ids += found["input_ids"][:count]
            ends += [length + end for _, end in found["offset_mapping"][:count]]
            length += len(text)
        return Pieces(ids, ends)
