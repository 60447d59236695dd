"""Ends a process none of whose threads can run, because code that holds the interpreter lock never returns."""

from __future__ import annotations

import faulthandler
import os
import signal
from types import TracebackType
from typing import Self

STANDARD_ERROR = 2
"""The file descriptor, whatever ``sys.stderr`` is."""

CPU_SECONDS = 10.0
"""The least processor seconds for each core before the timer runs down."""


class LastWord:
    """A timer of the operating system that ends the process unless it is wound up; it runs while the context is open.

    It counts processor time, so a suspended process is not ended. When it runs down, code that needs no interpreter
    lock writes the tracebacks of all threads to standard error, and the process ends. It runs for ``seconds`` of
    processor time, and for at least :data:`CPU_SECONDS` for each core.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = max(seconds, CPU_SECONDS * (os.cpu_count() or 1))

    def wind_up(self) -> None:
        """Restart the timer."""
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __enter__(self) -> Self:
        faulthandler.register(signal.SIGPROF, file=STANDARD_ERROR, all_threads=True, chain=True)
        self.wind_up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.unregister(signal.SIGPROF)
