"""Where rows hold the images of their prompts: in columns, in parts of messages, and at placeholders in text."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

from oppo.data.rows import Row
from oppo.errors import DataError, counted
from oppo.images import ImageFiles

COLUMNS: Final = ("image", "images")
"""Columns with the images of a prompt, one or a list, in the order in which it shows them."""

PLACEHOLDER: Final = "<image>"
"""Stands for the next image in a prompt's text, or in the text of its messages where no part is an image."""

KINDS: Final = ("image", "image_url")
"""The ``type`` of a part of a message that is an image: one of its own, or else the next of the columns."""

Gathered: TypeAlias = tuple[Row, Sequence[str] | list[dict[str, Any]], list[Path]]
"""A row with paths in place of images; its prompt, texts between images or messages with parts; the images."""


def image_parts(value: object) -> Iterator[Mapping[str, Any]]:
    for message in value if isinstance(value, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type") in KINDS:
                yield part


def misnamed(row: Row, column: str) -> str:
    """Return the column with an image for which a prompt has a place, and which is not read by its name; or ``""``."""
    asked = PLACEHOLDER in str(row.get(column))
    return next((name for name, value in row.items() if asked and name != column and _is_image(value)), "")


def _is_image(value: object) -> bool:
    if isinstance(value, Mapping):
        return isinstance(value.get("bytes"), bytes)
    if isinstance(value, list | tuple):
        return bool(value) and all(map(_is_image, value))
    return _NAMED.search(value) is not None if isinstance(value, str) else hasattr(value, "getbbox")  # of Pillow


_NAMED: Final = re.compile(r"^data:image/|\.(png|jpe?g|webp|gif|bmp|tiff?)\Z", re.IGNORECASE)


def gathered(row: Row, column: str, files: ImageFiles, place: str) -> Gathered:
    named = {name: row[name] for name in COLUMNS if row.get(name) is not None}
    every = {name: each if isinstance(each, list | tuple) else [each] for name, each in named.items()}
    listed = {name: [each for each in values if each not in (None, "")] for name, values in every.items()}
    given = [files.file(each, f"{place}, column {name!r}") for name, values in listed.items() for each in values]
    paths = iter(map(str, given))
    written: dict[str, object] = {
        name: [next(paths) for _ in values] if isinstance(named[name], list | tuple) else next(paths, None)
        for name, values in listed.items()
    }
    value, waiting, taken = row[column], list(given), list[Path]()

    def image(part: Mapping[str, Any]) -> dict[str, object]:
        held = {key: each for key, each in part.items() if key != "type" and each is not None}
        own = held.get("image_url", held)
        if not own and not waiting:
            raise _miscounted(place, named, len(given), f"more than {counted(len(given), 'place')}")
        taken.append(files.file(own, place) if own else waiting.pop(0))
        return {"type": "image", "image": str(taken[-1])}

    if isinstance(value, str):
        pieces = value.split(PLACEHOLDER)
        if len(pieces) != len(given) + 1:
            raise _miscounted(place, named, len(given), counted(len(pieces) - 1, "place"))
        return {**row, **written}, pieces, given
    if not (isinstance(value, list) and all(isinstance(each, Mapping) for each in value)):
        raise DataError(f"{place}: expected text or a list of chat messages beside images")
    messages = [dict(message) for message in value]
    if not [*image_parts(value)]:
        messages = _placed(messages, len(given))
    for message in messages:
        if isinstance(parts := message.get("content"), list):
            is_image = [isinstance(part, Mapping) and part.get("type") in KINDS for part in parts]
            message["content"] = [image(part) if it else part for part, it in zip(parts, is_image, strict=True)]
    if waiting:
        raise _miscounted(place, named, len(given), counted(len(given) - len(waiting), "place"))
    return {**row, **written, column: messages}, messages, taken


def _placed(messages: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    # At the placeholders of its text, or else before the text of the first message of a user, as TRL has them.
    if any(PLACEHOLDER in text for message in messages for text in _texts(message)):
        return [_split(message) for message in messages]
    first = next((at for at, message in enumerate(messages) if message.get("role") == "user"), None)
    if first is None:
        return messages
    content = messages[first].get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    shown = {**messages[first], "content": [*({"type": "image"} for _ in range(count)), *parts]}
    return [*messages[:first], shown, *messages[first + 1 :]]


def _texts(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content")
    for part in content if isinstance(content, list) else [{"text": content}]:
        if isinstance(part, Mapping) and isinstance(text := part.get("text"), str):
            yield text


def _split(message: dict[str, Any]) -> dict[str, Any]:
    if not any(PLACEHOLDER in text for text in _texts(message)):
        return message
    parts = list[dict[str, Any]]()
    for text in _texts(message):
        for number, piece in enumerate(text.split(PLACEHOLDER)):
            parts += [{"type": "image"}] * (number > 0) + [{"type": "text", "text": piece}] * bool(piece)
    return {**message, "content": parts}


def _miscounted(place: str, columns: Iterable[str], images: int, places: str) -> DataError:
    return DataError(
        f"{place}: the prompt has {places} for {counted(images, 'image')} in {' and '.join(columns) or 'its row'}: "
        f"expected one for each, {PLACEHOLDER} in its text or a part {{'type': 'image'}}"
    )
