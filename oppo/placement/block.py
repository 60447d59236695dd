"""Memory that several processes share."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
from typing import Self


class Block(mmap.mmap):
    """Bytes that every process that receives this block can read and change.

    The memory has no name and lies in no directory: it is freed when its processes end, however they end, and the small
    ``/dev/shm`` of a container is no limit. Any buffer over a block keeps it alive. A block takes two file descriptors.

    Args:
        fd: of the memory; the block owns it from now on.
    """

    _fd: int

    def __new__(cls, fd: int) -> Self:
        """Return the block behind a file descriptor."""
        block = super().__new__(cls, fd, 0)
        block._fd = fd
        weakref.finalize(block, os.close, fd)
        return block

    @classmethod
    def new(cls, size: int) -> Self:
        """Return a new block of ``size`` bytes, at least 1, all 0.

        The memory is allocated here, so a shortage is an error now, not a fault at the first touch.

        Raises:
            OSError: there is too little memory.
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
