"""The prompt behind which a teacher reads a response that the policy wrote behind another."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from string import Formatter
from typing import Final

import numpy as np

from oppo.data.prompts import Message, Tokenizer, encoded
from oppo.data.rows import Row
from oppo.errors import ConfigError, DataError, did_you_mean, shown
from oppo.events import Prompt
from oppo.scorers import SIBLING

PROMPT: Final = "prompt"
"""The field of a template for the policy's prompt: its text, or that of its last message of a user."""


def template_fields(template: str) -> Collection[str]:
    """Return the names in a template, ``{name}`` each; a brace of the text itself is doubled.

    Raises:
        ValueError: a brace is alone, or a field is no name.
    """
    fields: dict[str, None] = {}
    for _, name, form, conversion in Formatter().parse(template):
        if name is not None and (not name.isidentifier() or form or conversion):
            raise ValueError(f"{{{name}}} is no field: expected a name in braces, and braces of the text doubled")
        if name is not None:
            fields[name] = None
    return fields


@dataclass(frozen=True, kw_only=True)
class PrivilegedPrompt:
    """Makes the teacher's prompt of the policy's: from a column of its row, or by a template.

    Attributes:
        tokenizer: the policy's; or returns it for a row, where its chat template shows the tools of that row.
        decode: returns the text of token ids, for a sibling.
        column: the column with the whole prompt, text or chat messages; empty: there is a ``template``.
        template: text with fields ``{name}``, each a column with text or a number. It stands in place of the content of
            the prompt's last message of a user, or of a prompt that is text. ``{prompt}`` is the text that it replaces.
            ``{sibling}`` is the response that :class:`oppo.stages.Siblings` chose; a rollout without one has no prompt
            of the teacher.
        prompt_column: the column with the policy's prompt.

    Raises:
        ConfigError: there is neither a column nor a template, or both, or a field of the template is no name.
    """

    tokenizer: Tokenizer | Callable[[Row], Tokenizer]
    decode: Callable[[Sequence[int]], str]
    column: str = ""
    template: str = ""
    prompt_column: str = "prompt"

    def __post_init__(self) -> None:
        if bool(self.column) == bool(self.template):
            raise ConfigError("a teacher's prompt comes from a column or a template: give one of the two")
        try:
            template_fields(self.template)
        except ValueError as error:
            raise ConfigError(f"template: {error}") from error

    @property
    def of_siblings(self) -> bool:
        return SIBLING in template_fields(self.template)

    def check_columns(self, known: Collection[str]) -> None:
        """Raise ``ConfigError`` unless rows with these columns have what the prompt is made of."""
        named = [self.column] if self.column else [name for name in template_fields(self.template) if name != SIBLING]
        if self.of_siblings and SIBLING in known:
            raise ConfigError(
                f"{{{SIBLING}}} in teacher.template is a response of the policy, and data.prompts has a column of that "
                "name: give the column another one"
            )
        own = {PROMPT: self.prompt_column}
        for name in (name for name in named if (name if self.column else own.get(name, name)) not in known):
            key = "teacher.column" if self.column else "teacher.template"
            raise ConfigError(
                f"{key} names {name!r}, which is no column of data.prompts{did_you_mean(name, known)}; the columns "
                f"there are {', '.join(sorted(known))}"
            )

    def __call__(self, prompt: Prompt) -> Prompt | None:
        """Return the prompt as the teacher reads it; ``None``: no sibling passed.

        Raises:
            DataError: a column is missing or holds something else.
        """
        row, place = prompt.columns, f"prompt {prompt.admission}"
        if self.of_siblings and row.get(SIBLING) is None:
            return None
        value = self._column(row, self.column, place) if self.column else self._from_template(row, place)
        tokenizer = self.tokenizer(row) if callable(self.tokenizer) else self.tokenizer
        tokens = encoded(value, tokenizer, None, f"{place}, the teacher's prompt")
        return replace(prompt, tokens=tokens, columns={**row, self.prompt_column: value})

    def _from_template(self, row: Row, place: str) -> str | Sequence[Message]:
        given = self._column(row, self.prompt_column, place)
        at, text = _last_of_user(given, place)
        fields = {name: self._field(row, name, place) for name in template_fields(self.template) if name != PROMPT}
        filled = self.template.format(**{**fields, PROMPT: text})
        if isinstance(given, str):
            return filled
        messages = list(given)
        return [*messages[:at], {**messages[at], "content": filled}, *messages[at + 1 :]]

    def _field(self, row: Row, name: str, place: str) -> str:
        if name == SIBLING:
            return self.decode(np.asarray(row[SIBLING]).tolist())
        value = row.get(name)
        if not isinstance(value, str | int | float):
            raise DataError(
                f"{place}, column {name!r}: expected text or a number for teacher.template, {_got(row, name)}"
            )
        return str(value)

    def _column(self, row: Row, name: str, place: str) -> str | Sequence[Message]:
        value = row.get(name)
        if isinstance(value, str | list) and value:
            return value
        raise DataError(f"{place}, column {name!r}: expected text or chat messages for the teacher, {_got(row, name)}")


def _last_of_user(given: str | Sequence[Message], place: str) -> tuple[int, str]:
    # Where in chat messages a template's text stands, and the text that it replaces.
    if isinstance(given, str):
        return 0, given
    for at in range(len(given) - 1, -1, -1):
        if given[at].get("role") == "user" and isinstance(text := given[at].get("content"), str):
            return at, text
    raise DataError(f"{place}: teacher.template stands in place of a user's message with text, and there is none")


def _got(row: Row, name: str) -> str:
    return f"got {shown(row[name])}" if name in row else "and there is no such column"
