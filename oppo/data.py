"""Prompts: read from a file once, checked in full before anything is trained, then served in a seeded order.

A prompt's admission number is its ordinal in :class:`PromptStream`, whatever the schedule. It keys the sampling noise,
so with the same seed a prompt meets the same noise at any chunk size, overcommit or resume.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Protocol, TypeAlias, TypeVar

import numpy as np

from oppo.errors import DataError, one_line
from oppo.events import IntArray, Prompt
from oppo.numeric import require_whole
from oppo.observe import silent
from oppo.user_code import shown

T = TypeVar("T")

OverLong: TypeAlias = Literal["filter", "truncate", "error"]
Message: TypeAlias = dict[str, str]
JsonRow: TypeAlias = Mapping[str, object]


class Tokenizer(Protocol):
    """A tokenizer, as far as reading prompts needs one; implemented by :class:`oppo.hf.text.Text`."""

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`encode_chat` works."""

    def encode(self, text: str) -> Sequence[int]:
        """Return the token ids of a prompt, special tokens included as the tokenizer adds them."""

    def encode_chat(self, messages: Sequence[Message]) -> Sequence[int]:
        """Return the token ids of a conversation, up to where the assistant's next message begins."""


def read_prompts(
    path: Path,
    tokenizer: Tokenizer,
    *,
    column: str = "prompt",
    max_prompt_tokens: int = 512,
    over_long: OverLong = "filter",
    tell: Callable[[str], None] = silent,
) -> list[Prompt]:
    """Return every usable prompt of a ``.jsonl`` or ``.parquet`` file, in file order, numbered from 0.

    Args:
        path: the file; one row a prompt.
        tokenizer: of the policy.
        column: the column that holds the prompt: a string, or a list of ``{"role": ..., "content": ...}`` to which the
            tokenizer's chat template is applied. Reward functions get all columns unchanged.
        max_prompt_tokens: a prompt of more tokens is over-long.
        over_long: leave such prompts out, keep their last ``max_prompt_tokens`` tokens, or refuse the file.
        tell: called with a sentence about the over-long prompts, if any.

    Raises:
        DataError: the file cannot be read, a row is malformed, a prompt is empty, or no prompt is left.
    """
    require_whole("max_prompt_tokens", max_prompt_tokens, 1)
    prompts: list[Prompt] = []
    long: list[str] = []
    total = 0
    for place, row in _rows(path):
        total += 1
        if column not in row:
            raise DataError(f"{place}: no column {column!r}; the columns there are {', '.join(row) or '(none)'}")
        tokens = _encoded(row[column], tokenizer, f"{place}, column {column!r}")
        if len(tokens) > max_prompt_tokens:
            long.append(place)
            if over_long != "truncate":
                continue
            tokens = tokens[-max_prompt_tokens:]
        number = len(prompts)
        prompts.append(Prompt(rollout=number, admission=number, tokens=tokens, group=number, columns=dict(row)))
    if long:
        sentence = f"{len(long)} of {total} prompts of {path} are longer than {max_prompt_tokens} tokens"
        if over_long == "error":
            raise DataError(f"{sentence}, the first at {long[0]}; filter or truncate them, or raise max_prompt_tokens")
        tell(f"{sentence}: {'left out' if over_long == 'filter' else 'their beginnings are cut off'}")
    if not prompts:
        raise DataError(f"{path} holds no prompt" if not total else f"no prompt of {path} is left: all are over-long")
    return prompts


def _encoded(value: object, tokenizer: Tokenizer, place: str) -> IntArray:
    """Return int32 [P], P >= 1."""
    tokens: Sequence[int] = ()
    if isinstance(value, str):
        if value.strip():
            tokens = _encoded_by(tokenizer.encode, value, place, "the policy's tokenizer")
    elif isinstance(value, list):
        messages = [_message(each, place) for each in value]
        if messages and not tokenizer.has_chat_template:
            raise DataError(
                f"{place}: chat messages need a tokenizer with a chat template, and the policy's has none; "
                "give the prompt as plain text, or set the tokenizer's chat_template"
            )
        if messages:
            tokens = _encoded_by(tokenizer.encode_chat, messages, place, "the chat template of the policy's tokenizer")
    else:
        raise DataError(f"{place}: expected text or a list of chat messages, got {shown(value)}")
    if not len(tokens):
        raise DataError(f"{place}: the prompt is empty")
    return np.asarray(tokens, np.int32)


def _encoded_by(encode: Callable[[T], Sequence[int]], value: T, place: str, by: str) -> Sequence[int]:
    try:
        return encode(value)
    except MemoryError:
        raise
    except Exception as error:  # any kind: a template is a program, and a tokenizer may be one too
        raise DataError(f"{place}: {by} cannot read {shown(value)}: {one_line(error)}") from error


def _message(value: object, place: str) -> Message:
    if isinstance(value, dict):
        role, content = value.get("role"), value.get("content")
        if isinstance(role, str) and isinstance(content, str):
            return {"role": role, "content": content}
    raise DataError(f"{place}: a chat message is {{'role': text, 'content': text}}, got {shown(value)}")


def _rows(path: Path) -> Iterator[tuple[str, JsonRow]]:
    """Yield each row with its location, in words."""
    if path.suffix == ".jsonl":
        return _json_rows(path)
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    raise DataError(f"{path}: expected a .jsonl or .parquet file")


def _regular(path: Path) -> Path:
    """Require a regular file: a pipe or a device may never end."""
    if not path.is_file():
        raise DataError(f"there is no prompt file {path}" + ", but a directory, pipe or device" * path.exists())
    return path


def _json_rows(path: Path) -> Iterator[tuple[str, JsonRow]]:
    try:
        with _regular(path).open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    place = f"{path}, line {number}"
                    yield place, _json_row(line, place)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text: {error}") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def _json_row(line: str, place: str) -> JsonRow:
    try:
        row: object = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{place}: not valid JSON: {error.msg} at character {error.pos + 1}") from error
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, lists in lists without end
        raise DataError(f"{place}: not valid JSON: {error}") from error
    if not isinstance(row, dict):
        raise DataError(f"{place}: expected a JSON object, got {shown(row)}")
    return row


def _parquet_rows(path: Path) -> Iterator[tuple[str, JsonRow]]:
    import pyarrow as pa  # noqa: PLC0415 - 0.1 s, and most files are JSON lines
    from pyarrow import parquet  # noqa: PLC0415

    try:
        table = parquet.read_table(_regular(path))
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from error
    for number, row in enumerate(table.to_pylist(), 1):
        yield f"{path}, row {number}", row


class PromptStream(Iterator[Prompt]):
    """The prompts in a seeded order, reshuffled every epoch, each with its ordinal as admission number.

    The order of an epoch depends on the seed and the epoch only, so :attr:`position` is all the state there is.

    Args:
        prompts: at least one.
        seed: of the order; streams with the same seed and prompts yield the same order.
        epochs: passes over the prompts, after which the stream ends; 0 never ends.
        position: how many prompts were taken already.

    Example:
        >>> prompts = [Prompt(i, i, np.array([i], np.int32)) for i in range(3)]
        >>> [(p.admission, p.tokens.tolist()) for p in PromptStream(prompts, seed=1, epochs=1)]
        [(0, [2]), (1, [0]), (2, [1])]
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, epochs: int = 0, position: int = 0) -> None:
        if not prompts:
            raise DataError("a prompt stream needs at least one prompt")
        for name, number in (("seed", seed), ("epochs", epochs), ("position", position)):
            require_whole(name, number, 0)
        self._prompts = tuple(prompts)
        self._seed = seed
        self._epochs = epochs
        self._epoch = -1
        self._order: Sequence[int] = ()
        self.position = position

    def __len__(self) -> int:
        """Return how many prompts the whole stream holds; an endless one raises a ``TypeError``."""
        if not self._epochs:
            raise TypeError("an endless prompt stream has no length")
        return self._epochs * len(self._prompts)

    def __iter__(self) -> PromptStream:
        return self

    def __next__(self) -> Prompt:
        if self._epochs and self.position >= len(self):
            raise StopIteration
        self.position += 1
        return self.at(self.position - 1)

    def at(self, number: int) -> Prompt:
        """Return the prompt with this admission number, whatever the position."""
        epoch, index = divmod(number, len(self._prompts))
        if epoch != self._epoch:
            self._epoch = epoch
            self._order = np.random.default_rng((self._seed, epoch)).permutation(len(self._prompts)).tolist()
        return replace(self._prompts[self._order[index]], rollout=number, admission=number, group=number)

    def columns(self, number: int) -> Mapping[str, object]:
        """Return the columns of the prompt with this admission number."""
        return self.at(number).columns

    def state_dict(self) -> dict[str, int]:
        """Return the position."""
        return {"position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from the position of another stream over the same prompts."""
        self.position = state["position"]
