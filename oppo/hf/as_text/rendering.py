"""A rollout as the text that a reward model reads: prompt and response, in one of several forms."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias

from oppo.data.prompts import Message
from oppo.errors import ConfigError, one_line
from oppo.events import Prompt
from oppo.hf.tokenizer import HfTokenizer

Form: TypeAlias = Literal["chat", "joined", "pair", "response"]
"""The model's own chat template; one text after the other; two segments; the response alone."""

PromptText: TypeAlias = str | Sequence[Message]

_MARK: Final = "RESPONSE0OF0THE0POLICY"
"""Stands for the response where the text before it is wanted."""


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text to be tokenized.

    Attributes:
        pair: the second segment, for models that read two.
        special: whether the tokenizer adds its special tokens; a chat template has them already.
    """

    text: str
    pair: str | None = None
    special: bool = True


class Rendering:
    """Renders rollouts for one model.

    Args:
        form: ``chat``: the model's own chat template, prompt messages and the response as the assistant's; a prompt
            that is plain text is the user's message. ``joined``: the prompt's text and the response, one directly
            after the other; of chat messages their contents, with a blank line after each. ``pair``: the same as two
            segments. ``response``: the response alone.
        reader: the model's tokenizer.

    Raises:
        ConfigError: the tokenizer has no chat template, and needs one.
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
        """Return the text of a prompt and its whole response.

        Raises:
            ConfigError: the chat template cannot render them.
        """
        match self.form:
            case "chat":
                return Rendered(self._chat(prompt, response), special=False)
            case "joined":
                return Rendered(plain(prompt) + response)
            case "pair":
                return Rendered(plain(prompt), response)
            case "response":
                return Rendered(response)

    def opening(self, prompt: PromptText) -> Rendered | None:
        """Return the text before the response; ``None`` if it depends on the response."""
        match self.form:
            case "chat":
                opening, *rest = self._chat(prompt, _MARK).split(_MARK)
                return Rendered(opening, special=False) if len(rest) == 1 else None
            case "joined":
                return Rendered(plain(prompt))
            case "response":
                return Rendered("")
            case "pair":
                return None

    def _chat(self, prompt: PromptText, response: str) -> str:
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        try:
            rendered = self._reader.inner.apply_chat_template(
                [*messages, {"role": "assistant", "content": response}], tokenize=False
            )
        except Exception as error:  # any kind: a template is a program
            raise ConfigError(f"its chat template cannot render the messages of a prompt: {one_line(error)}") from error
        return str(rendered)


def prompt_text(prompt: Prompt, column: str, decode: Callable[[Sequence[int]], str]) -> PromptText:
    """Return a prompt as its data has it in ``column``, text or chat messages; without that, its decoded tokens."""
    found = prompt.columns.get(column)
    if isinstance(found, str):
        return found
    if isinstance(found, list) and found and all(isinstance(each, dict) for each in found):
        return [{str(key): str(value) for key, value in each.items()} for each in found]
    return decode(prompt.tokens.tolist())


def plain(prompt: PromptText) -> str:
    """Return a prompt as one text: of chat messages their contents, with a blank line after each."""
    return prompt if isinstance(prompt, str) else "".join(f"{message['content']}\n\n" for message in prompt)
