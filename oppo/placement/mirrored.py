"""Blocks of a few bytes with one writer, which may be used where memory is not shared: there their bytes are sent.

::

    Notice   the caller of a call writes it, and the work reads it while it goes on
    Gauge    the work writes it, and the caller reads it while a call goes on, and afterwards

To a child of this machine they are blocks as others are, which both processes map.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, Self, TypeAlias

from oppo.placement.block import Block

_numbers: Final = itertools.count()

Tell: TypeAlias = Callable[[bytes], object]
"""Is called with the bytes that were written."""


class Mirrored(Block):
    """A block with one writer.

    Attributes:
        number: identifies it among those of this process.
    """

    number: int

    def __new__(cls, fd: int) -> Self:
        """Return the block behind a file descriptor."""
        block = super().__new__(cls, fd)
        block.number = next(_numbers)
        return block


class Gauge(Mirrored):
    """A block that is written where an instance lives, for its caller: it belongs to the instance.

    From another machine its bytes come with the answers of its place and with what a call asks of its caller, and at
    least every second while such a call goes on.
    """


class Notice(Mirrored):
    """A block that is written by the caller of a call with callbacks, for its work. Each write is sent at once."""

    _turn: threading.Lock
    _watchers: list[Tell]

    def __new__(cls, fd: int) -> Self:
        """Return the block behind a file descriptor."""
        block = super().__new__(cls, fd)
        block._turn, block._watchers = threading.Lock(), []
        return block

    def write_at(self, at: int, value: bytes) -> None:
        """Write ``value`` from the byte ``at`` on; may be called from any thread."""
        with self._turn:
            self[at : at + len(value)] = value
            for tell in self._watchers:
                tell(self[:])

    @contextmanager
    def watched(self, tell: Tell) -> Iterator[bytes]:
        """Call ``tell`` at each write, in the writer's thread, while the context is open; yield the bytes so far."""
        with self._turn:
            self._watchers.append(tell)
            written = self[:]
        try:
            yield written
        finally:
            with self._turn:
                self._watchers.remove(tell)
