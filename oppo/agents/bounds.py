"""Bounds of what agents send: how much it is, how deep, and for how long reading it keeps the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final, TypeVar

import anyio

from oppo.errors import running_loop

T = TypeVar("T")

BODY: Final = 8 * 2**20
"""The most bytes of a request."""

CHARACTERS: Final = 1_000_000
"""The most characters of a request, in all of its texts and names; any other value counts as one."""

MESSAGES: Final = 4096
"""The most messages of a request."""

DEPTH: Final = 100
"""The most levels of lists and objects."""

LONG: Final = 20_000
"""Bytes or characters above which what is done with them is done in a thread."""


def read_json(text: bytes | str) -> object:
    counted = text.count if isinstance(text, bytes) else text.encode("utf-8", "replace").count
    if sum(map(counted, (b"[", b"{", b","))) > CHARACTERS:  # before there are objects
        raise ValueError(f"it has more than {CHARACTERS} values: shorten its messages")
    try:
        value: object = json.loads(text)
    except RecursionError:
        raise ValueError(f"it is nested more than {DEPTH} levels deep") from None
    length, level = 0, [value]
    for _ in range(DEPTH):
        inner = list[object]()
        for each in level:
            if isinstance(each, dict):
                length += sum(map(len, each))
                inner += each.values()
            elif isinstance(each, list):
                inner += each
            else:
                length += len(each) if isinstance(each, str) else 1
        if length + len(inner) > CHARACTERS:
            raise ValueError(f"it has more than {CHARACTERS} characters: shorten its messages")
        if not inner:
            return value
        level = inner
    raise ValueError(f"it is nested more than {DEPTH} levels deep")


async def apart(size: int, work: Callable[[], T]) -> T:
    """Return what ``work`` returns; a large one runs in a thread, so that the event loop goes on."""
    if size < LONG or getattr(running_loop(), "virtual", False):
        return work()
    return await anyio.to_thread.run_sync(work)
