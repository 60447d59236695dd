"""The lock of a run directory: one run writes it, and the system frees it when that process ends, however it ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import TextIO

from oppo.errors import ConfigError

LOCK = "running.lock"
"""The file that is locked; it holds the process id of the run that writes the directory, and is gone afterwards."""


class Lock:
    """Holds the lock of a directory until it is released.

    Raises:
        ConfigError: another run holds it.
        OSError: the file cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / LOCK
        self._file = self._path.open("a+", encoding="utf-8")
        try:
            while not self._is_had():
                self._file.close()
                self._file = self._path.open("a+", encoding="utf-8")
        except BlockingIOError as error:
            self._file.close()
            raise ConfigError(taken(directory)) from error
        self._file.truncate(0)
        self._file.write(f"{os.getpid()}\n")
        self._file.flush()

    def _is_had(self) -> bool:
        """Lock the open file; return whether it still is the one at the path: its last owner may have removed it.

        Raises:
            BlockingIOError: another run holds it.
        """
        fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return _is_at(self._path, self._file)

    def release(self) -> None:
        """Let others have the directory; idempotent."""
        if not self._file.closed:
            self._path.unlink(missing_ok=True)
            self._file.close()


def is_locked(directory: Path) -> bool:
    """Return whether a run is writing the directory."""
    try:
        with (directory / LOCK).open(encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def taken(directory: Path) -> str:
    """Return the sentence that says who is writing the directory."""
    try:
        owner = (directory / LOCK).read_text(encoding="utf-8").strip()
    except OSError:  # it has ended meanwhile
        owner = ""
    return (
        f"the run directory {directory} is being written by another run (process {owner or 'unknown'}): "
        f"choose another run.name, or wait for it to end"
    )


def _is_at(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
