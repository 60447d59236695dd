"""Rows to prompts, each checked in full before anything is trained; and a teacher's prompts, which stand for them."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from string import Formatter
from typing import Final, Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from oppo.data.images import COLUMNS, PLACEHOLDER, image_parts, misnamed
from oppo.data.rows import Located, Row, is_hub_name, rows_of_directory, rows_of_file, rows_of_hub, rows_of_program
from oppo.declared import PositiveInteger, validated
from oppo.errors import ConfigError, DataError, did_you_mean, noted, one_line, shown
from oppo.events import IntArray, Prompt
from oppo.images import ImageRef
from oppo.log import logger
from oppo.scorers import SIBLING

T = TypeVar("T")

OverLongPrompt: TypeAlias = Literal["filter", "truncate", "error"]
Message: TypeAlias = Mapping[str, object]
"""A chat message: ``role``, and what the chat template reads besides: ``content``, ``tool_calls`` or others."""

CHARACTERS: Final = 1 << 16
"""The last characters of a prompt that are tokenized, or 128 for each of ``max_prompt_tokens`` if that is more.

No token of a vocabulary has more: a longer prompt is over-long however it is tokenized.
"""


TEXT_ONLY: Final = "policies read text only"

MEDIA: Final = ("image", "images", "video", "videos", "audio", "audios")
"""Columns in which datasets have what a prompt shows besides its text."""


class Tokenizer(Protocol):
    """A tokenizer, as far as reading prompts needs one; implemented by :class:`oppo.hf.tokenizer.HfTokenizer`."""

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`encode_chat` works."""

    def encode(self, text: str, *, last: int | None = None) -> Sequence[int]:
        """Return the token ids of a prompt, or of its ``last`` characters, begun as the tokenizer begins texts."""

    def encode_chat(self, messages: Sequence[Message], *, last: int | None = None) -> Sequence[int]:
        """Return the token ids of a conversation, up to where the assistant's next message begins or goes on.

        Args:
            messages: as the data has them.
            last: tokenize only this many characters, from the end; ``None``: all.
        """


Begin: TypeAlias = Callable[[Row, str], tuple[Row, Tokenizer]]
"""Returns a row as an environment begins it, given the column of its prompt, and the tokenizer that reads that.

An environment that gives no row a prompt returns the very row that it was given.
"""


ReadImages: TypeAlias = Callable[[Row, str, str, Begin], tuple[Row, Sequence[int], tuple[ImageRef, ...]]]
"""Returns a row with images, given its column, its place and what begins it, with paths in place of images; the ids of
its prompt; the images."""


@dataclass(frozen=True, slots=True, kw_only=True)
@validated()
class Encoding:
    tokenizer: Tokenizer
    # The column with the prompt: a string, or a list of chat messages, rendered by the tokenizer's template; a last
    # message of the assistant is continued. Empty: an agent reads the row itself.
    column: str = "prompt"
    max_prompt_tokens: PositiveInteger = 512
    over_long: OverLongPrompt = "filter"  # leaves longer ones out; or they keep their last tokens, or are an error
    begin: Begin | None = None  # an environment's change to a row before it is rendered
    images: ReadImages | str = TEXT_ONLY  # or why none are read

    def read(self, place: str, row: Row) -> tuple[Row, IntArray, tuple[ImageRef, ...]]:
        if not self.column:
            row_digest = hashlib.sha256(json.dumps(dict(row), sort_keys=True, default=repr).encode()).digest()
            return row, np.frombuffer(row_digest[:4], np.int32) & np.int32(0x7FFFFFFF), ()
        media, shown_in = [name for name in MEDIA if _holds(row.get(name))], row.get(self.column)
        awaited = any(name in row for name in COLUMNS) and PLACEHOLDER in str(shown_in)
        shows = media or awaited or any(True for _ in image_parts(shown_in))
        if not shows and (other := misnamed(row, self.column)):
            raise DataError(
                f"{place}: the prompt has {PLACEHOLDER}, and column {other!r} an image: name the column 'image' or "
                f"'images' for the prompt to show it, or take {PLACEHOLDER} out"
            )
        waits = shows and self.begin is not None  # for its images to be files
        begun, tokenizer = (row, self.tokenizer) if waits else self._begun(row, self.column, place, row)
        if shows:
            kinds = sorted({name.removesuffix("s") for name in media} or {"image"})
            if isinstance(self.images, str) or kinds != ["image"]:
                others = [kind for kind in kinds if kind != "image"]
                why = self.images if isinstance(self.images, str) else "of these, prompts may have images"
                raise DataError(
                    f"{place}: {f'column {media[0]!r}' if media else 'a message'} has {(others or kinds)[0]}s for the "
                    f"prompt, and {why}: leave it out, or give it another name if only a reward function reads it"
                )
            asked = {**row, self.column: row.get(self.column, [{"role": "user", "content": []}])}
            begun, ids, images = self.images(asked, self.column, place, partial(self._begun, place=place, raw=row))
            return begun, np.asarray(ids, np.int32), images
        read = max(CHARACTERS, 128 * (self.max_prompt_tokens + 1))
        return begun, encoded(begun[self.column], tokenizer, read, f"{place}, column {self.column!r}"), ()

    def _begun(self, row: Row, column: str, place: str, raw: Row) -> tuple[Row, Tokenizer]:
        begun, tokenizer = row, self.tokenizer
        if self.begin is not None:
            with noted(f"while reading {place}"):
                begun, tokenizer = self.begin(row, column)
        if column not in (raw if begun is row else begun):
            raise DataError(
                f"{place}: no column {column!r}; the columns there are {', '.join(raw) or '(none)'}: name one as column"
            )
        return begun, tokenizer

    def fitted(self, tokens: IntArray, place: str, images: Sequence[ImageRef]) -> IntArray | None:
        if len(tokens) <= self.max_prompt_tokens:
            return tokens
        if images and self.over_long == "truncate":
            raise DataError(
                f"{place}: a prompt with images has {len(tokens)} tokens, and one of more than max_prompt_tokens = "
                f"{self.max_prompt_tokens} would lose a part of them: raise it, or set over_long = 'filter'"
            )
        return tokens[-self.max_prompt_tokens :] if self.over_long == "truncate" else None


def read_prompts(
    source: Path | str | Iterable[Mapping[str, object]],
    tokenizer: Tokenizer,
    *,
    column: str = "prompt",
    max_prompt_tokens: int = 512,
    over_long: OverLongPrompt = "filter",
    split: str = "train",
    subset: str = "",
    begin: Begin | None = None,
    images: ReadImages | str = TEXT_ONLY,
) -> list[Prompt]:
    """Return every usable prompt of a source, in its order, numbered from 0.

    Args:
        source: a ``.jsonl``, ``.csv`` or ``.parquet`` file, a directory that ``Dataset.save_to_disk`` wrote, the name
            of a dataset at a hub (the last two need the extra ``datasets``), or rows of a program, of which there is an
            end; one row a prompt.
        tokenizer: of the policy.
        column: the column that holds the prompt: a string, or a list of chat messages; see :class:`Encoding`. Reward
            functions get all columns unchanged.
        max_prompt_tokens: a prompt of more tokens is over-long.
        over_long: leave such prompts out, keep their last ``max_prompt_tokens`` tokens, or refuse the source.
        split: of a dataset with several.
        subset: of a dataset at a hub: the name of one of its configurations.
        begin, images: see :class:`Encoding`.

    Raises:
        DataError: the source cannot be read, a row is malformed, a prompt is empty, or no prompt is left.
    """
    encoding = Encoding(
        tokenizer=tokenizer,
        column=column,
        max_prompt_tokens=max_prompt_tokens,
        over_long=over_long,
        begin=begin,
        images=images,
    )
    name, rows = rows_of(source, split=split, subset=subset)
    prompts: list[Prompt] = []
    long: list[str] = []
    total = 0
    for place, row in rows:
        total += 1
        begun, tokens, seen = encoding.read(place, row)
        if len(tokens) > max_prompt_tokens:
            long.append(place)
        fitted = encoding.fitted(tokens, place, seen)
        if fitted is not None:
            number = len(prompts)
            prompts.append(Prompt(number, number, fitted, group=number, columns=dict(begun), images=seen))
    if long:
        message = f"{len(long)} of {total} prompts of {name} are longer than {max_prompt_tokens} tokens"
        if over_long == "error":
            raise DataError(f"{message}, the first at {long[0]}; filter or truncate them, or raise max_prompt_tokens")
        logger.info(f"{message}: {'left out' if over_long == 'filter' else 'their beginnings are cut off'}")
    if not prompts:
        raise DataError(f"{name} holds no prompt" if not total else f"no prompt of {name} is left: all are over-long")
    return prompts


def rows_of(
    source: Path | str | Iterable[Mapping[str, object]],
    *,
    split: str = "train",
    subset: str = "",
) -> tuple[str, Iterable[Located]]:
    if not isinstance(source, str | Path):
        return "the program's rows", rows_of_program(source)
    path = Path(source)
    try:
        is_directory, exists = path.is_dir(), path.exists()
    except OSError as error:  # the name is too long, or leads in a circle
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if is_directory:
        return str(path), rows_of_directory(path, split)
    if not exists and is_hub_name(str(source)):
        return str(source), rows_of_hub(str(source), split, subset)
    return str(path), rows_of_file(path)


def encoded(value: object, tokenizer: Tokenizer, read: int | None, place: str) -> IntArray:
    tokens: Sequence[int] = ()
    if isinstance(value, str):
        if value.strip():
            tokens = _encoded_by(partial(tokenizer.encode, last=read), value, place, "the policy's tokenizer")
    elif isinstance(value, list):
        if messages := checked_messages(value, tokenizer, place):
            encode = partial(tokenizer.encode_chat, last=read)
            tokens = _encoded_by(encode, messages, place, "the chat template of the policy's tokenizer")
    else:
        raise DataError(f"{place}: expected text or a list of chat messages, got {shown(value)}")
    if not len(tokens):
        raise DataError(f"{place}: the prompt is empty")
    return np.asarray(tokens, np.int32)


def checked_messages(
    value: Sequence[object], tokenizer: Tokenizer, place: str, *, images: bool = False
) -> Sequence[Message]:
    messages = [_message(each, place, images=images) for each in value]
    if messages and not tokenizer.has_chat_template:
        raise DataError(
            f"{place}: chat messages need a tokenizer with a chat template, and the policy's has none; "
            "give the prompt as plain text, or set data.chat_template"
        )
    return messages


def _holds(value: object) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds, value.values()))
    if isinstance(value, list | tuple):
        return any(map(_holds, value))
    is_nan = isinstance(value, float) and math.isnan(value)  # pandas has it for a missing value
    return not (value is None or value is False or is_nan or (isinstance(value, str) and not value))


def _encoded_by(encode: Callable[[T], Sequence[int]], value: T, place: str, by: str) -> Sequence[int]:
    try:
        return encode(value)
    except Exception as error:  # any kind: a template is a program, and a tokenizer may be one too
        raise DataError(f"{place}: {by} cannot read {shown(value)}: {one_line(error)}") from error


def _message(value: object, place: str, *, images: bool = False) -> Message:
    if not isinstance(value, dict) or not isinstance(value.get("role"), str):
        raise DataError(f"{place}: a chat message is {{'role': text, 'content': text}}, got {shown(value)}")
    content = value.get("content")
    given = content if isinstance(content, list) else []
    parts = [part for part in given if not (images and isinstance(part, dict) and part.get("type") == "image")]
    if others := [part for part in parts if not isinstance(part, dict) or not isinstance(part.get("text"), str)]:
        raise DataError(
            f"{place}: a part of a chat message is {{'type': 'text', 'text': text}}, or {{'type': 'image'}} where the "
            f"policy reads images, got {shown(others[0])}"
        )
    has_other = any(each is not None for key, each in value.items() if key not in {"role", "content"})
    if not isinstance(content, str | list) and not (content is None and has_other):
        raise DataError(
            f"{place}: a chat message is {{'role': text, 'content': text}}, got {shown(value)}; content may be absent "
            "beside other fields"
        )
    return value


PROMPT: Final = "prompt"
"""The field of a template for the policy's prompt: its text, or that of its last message of a user."""


def template_fields(template: str) -> Collection[str]:
    """Return the names in a template, ``{name}`` each; a brace of the text itself is doubled."""
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
    raise DataError(f"{place}: a template stands in place of a user's message with text, and there is none")


def _got(row: Row, name: str) -> str:
    return f"got {shown(row[name])}" if name in row else "and there is no such column"
