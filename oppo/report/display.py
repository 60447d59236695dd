"""Standard output and error that may go away: the run goes on, and its output is discarded."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TextIO, cast

from oppo.redact import harmless


class Display:
    """A text stream that discards its output after the first failed write, for the whole process."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write ``text``, or nothing once the stream is gone; return its length."""
        with self._enduring():
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "backslashreplace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        """Flush the stream; does nothing once it is gone."""
        with self._enduring():
            self._stream.flush()

    def __getattr__(self, name: str) -> object:
        return getattr(self._stream, name)

    @contextmanager
    def _enduring(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError):  # gone, full or closed
            with suppress(OSError, ValueError):  # a stream without a descriptor needs no redirection
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._stream.fileno())
                os.close(nowhere)


class _Harmless(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return harmless(super().format(record))


@contextmanager
def displays() -> Iterator[None]:
    """Let standard output and standard error go away without an error while the context is open.

    What user code logs without a handler of its own is shown without secrets and control characters, which may be a
    model's.
    """
    out, err = (cast("TextIO", Display(stream)) for stream in (sys.stdout, sys.stderr))
    last = logging.lastResort or logging.NullHandler()
    before = last.formatter
    with redirect_stdout(out), redirect_stderr(err):
        last.setFormatter(_Harmless())
        try:
            yield
        finally:
            last.setFormatter(before)
            out.flush()
            err.flush()
