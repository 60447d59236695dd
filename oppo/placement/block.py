"""Memory that several processes see at the same time."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref


class Block:
    """Bytes that every process that is sent this block sees, and may change, at the same time.

    They have no name and lie in no directory: nothing is left behind when their processes end, however they do, and
    the small ``/dev/shm`` of a container is no limit. A block takes one file descriptor, or two.

    Args:
        fd: of the memory; the block's own from now on.

    Attributes:
        bytes: the memory, writable.
    """

    def __init__(self, fd: int) -> None:
        self._fd = fd
        weakref.finalize(self, os.close, fd)
        self.bytes = mmap.mmap(fd, 0)

    @classmethod
    def of(cls, size: int) -> Block:
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
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def fileno(self) -> int:
        """Return the file descriptor: sending it sends the block."""
        return self._fd


def _nameless() -> int:
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())
