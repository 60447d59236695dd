"""Memory that several processes see at the same time."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import Self


class Block(mmap.mmap):
    """Bytes that every process that is sent this block sees, and may change, at the same time.

    They have no name and lie in no directory: nothing is left behind when their processes end, however they do, and
    the small ``/dev/shm`` of a container is no limit. Whatever lies in a block keeps it alive, as it does any buffer. A
    block takes two file descriptors.

    Args:
        fd: of the memory; the block's own from now on.
    """

    _fd: int

    def __new__(cls, fd: int) -> Self:
        """Return the block behind a file descriptor."""
        block = super().__new__(cls, fd, 0)
        block._fd = fd
        weakref.finalize(block, os.close, fd)
        return block

    @classmethod
    def new(cls, size: int) -> Block:
        """Return a new block of ``size`` bytes, at least 1, all of them 0.

        The memory is there then: a lack of it is an error here, not a fault at the first touch.

        Raises:
            OSError: there is not so much memory.
        """
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
        """Return the file descriptor: sending it sends the block."""
        return self._fd


def _nameless() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
