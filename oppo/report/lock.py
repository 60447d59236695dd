"""The lock of a run directory: one run holds it, and the system releases it when the process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from oppo.durable import opened
from oppo.errors import ConfigError

LOCK = "running.lock"
"""The file that is locked: it holds the process id of the run, which removes it in the end."""


class Lock:
    """Holds the lock of a directory until it is released.

    Raises:
        ConfigError: another run holds it.
        OSError: the file cannot be written, or is a link: what it leads to is left alone.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._file = opened(self._path, "a+")
        try:
            while not self._acquire():
                self._file.close()
                self._file = opened(self._path, "a+")
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(taken(directory)) from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def _acquire(self) -> bool:
        """Lock the open file; return whether it is still at its path, from where its last owner may have removed it.

        Raises:
            BlockingIOError: another run holds the lock.
        """
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        try:
            return os.path.samestat(self._path.stat(), os.fstat(self._file.fileno()))
        except FileNotFoundError:
            return False

    def release(self) -> None:
        """Release the directory; idempotent."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def is_locked(directory: Path) -> bool:
    """Return whether a run holds the lock of the directory."""
    try:
        with opened(directory / LOCK, "r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def taken(directory: Path) -> str:
    """Return the sentence that names the process writing the directory."""
    try:
        with opened(directory / LOCK, "r") as file:
            owner = file.read(20).strip()
    except (OSError, ValueError):  # the run has ended meanwhile, or the file was written by something else
        owner = ""
    return (
        f"the run directory {directory} is being written by another run (process {owner or 'unknown'}): "
        f"choose another run.name, or wait for it to end"
    )
