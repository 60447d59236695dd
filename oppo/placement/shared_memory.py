"""Memory that several processes share: bytes with one writer, and counts.

::

    Block     every process that has it may write it; it crosses as a file descriptor
    Notice    the caller of a call writes it, and the work reads it while it goes on
    Gauge     the work writes it, and the caller reads it while a call goes on, and afterwards
    Counts    int64 numbers in a block

To a child of this machine notices and gauges are blocks as others are. Where memory is not shared, their bytes are
sent.
"""

from __future__ import annotations

import itertools
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from ctypes import Structure, sizeof
from typing import ClassVar, Final, Self, TypeAlias

_numbers: Final = itertools.count()

Watch: TypeAlias = Callable[[bytes], object]  # is called with the bytes that were written


class Block(mmap.mmap):
    """Bytes that every process that receives this block can read and change. A block takes two file descriptors."""

    # The memory has no name and lies in no directory: it is freed when its processes end, however they end, and the
    # small /dev/shm of a container is no limit. Any buffer over a block keeps it alive.

    _fd: int

    def __new__(cls, fd: int) -> Self:
        block = super().__new__(cls, fd, 0)
        block._fd = fd
        weakref.finalize(block, os.close, fd)
        return block

    @classmethod
    def new(cls, size: int) -> Self:
        """Return a new block of ``size`` bytes, at least 1, all 0."""
        # The memory is allocated here, so a shortage is an error now, not a fault at the first touch.
        fd = os.memfd_create("oppo") if hasattr(os, "memfd_create") else _nameless()
        try:
            os.ftruncate(fd, size)
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(fd, 0, size)
            return cls(fd)
        except BaseException:
            os.close(fd)
            raise

    def fileno(self) -> int:
        return self._fd


def _nameless() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class Mirrored(Block):
    number: int

    def __new__(cls, fd: int) -> Self:
        block = super().__new__(cls, fd)
        block.number = next(_numbers)
        return block


class Gauge(Mirrored):
    """A block that is written where an instance lives, for its caller: it belongs to the instance.

    From another machine its bytes come with answers and requests, and at least every second while a call goes on.
    """


class Notice(Mirrored):
    """A block that is written by the caller of a call with callbacks, for its work. Each write is sent at once."""

    _turn: threading.Lock
    _watchers: list[Watch]

    def __new__(cls, fd: int) -> Self:
        block = super().__new__(cls, fd)
        block._turn, block._watchers = threading.Lock(), []
        return block

    def write_at(self, at: int, value: bytes) -> None:
        with self._turn:
            self[at : at + len(value)] = value
            for watch in self._watchers:
                watch(self[:])

    @contextmanager
    def watched(self, watch: Watch) -> Iterator[bytes]:
        """Call ``watch`` at each write, in the writer's thread, while the context is open; yield the bytes so far."""
        with self._turn:
            self._watchers.append(watch)
            written = self[:]
        try:
            yield written
        finally:
            with self._turn:
                self._watchers.remove(watch)


class Counts(Structure):
    """Numbers that all processes with this object share; a subclass names them, each a ``ctypes.c_int64``."""

    memory: ClassVar[type[Block]] = Block
    block: Block

    @classmethod
    def new(cls) -> Self:
        return cls.over(cls.memory.new(sizeof(cls)))

    @classmethod
    def over(cls, block: Block) -> Self:
        counts = cls.from_buffer(block)
        counts.block = block
        return counts

    def copy(self) -> Self:
        copied = self.new()
        copied.block[:] = self.block[:]
        return copied

    def __reduce__(self) -> tuple[Callable[[Block], Self], tuple[Block]]:
        return type(self).over, (self.block,)
