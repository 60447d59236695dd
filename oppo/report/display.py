"""Standard output and error that may go away: the run goes on, and its output is discarded."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import TextIO, cast


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


@contextmanager
def displays() -> Iterator[None]:
    """Let standard output and standard error go away without an error while the context is open."""
    out, err = (cast("TextIO", Display(stream)) for stream in (sys.stdout, sys.stderr))
    with redirect_stdout(out), redirect_stderr(err):
        try:
            yield
        finally:
            out.flush()
            err.flush()
