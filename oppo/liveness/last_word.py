"""The end of a process none of whose threads can run, since code that holds the interpreter lock never returns."""

from __future__ import annotations

import faulthandler
import os
import signal
from types import TracebackType
from typing import Self

STANDARD_ERROR = 2
"""The descriptor, which is there whatever stands for it in Python."""

CPU_SECONDS = 10.0
"""Of each core: the processor time that may pass at least between two moments at which the timer is wound up."""


class LastWord:
    """A timer of the system that ends the process unless it is wound up; a context manager while which it runs.

    It counts the processor time of the process, so that one that is suspended is not ended. When it runs down, the
    tracebacks of all threads go to standard error, by code that needs no interpreter lock, and the process ends.

    Args:
        seconds: of processor time; more where many cores work.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = max(seconds, CPU_SECONDS * (os.cpu_count() or 1))

    def wind_up(self) -> None:
        """Begin to count anew."""
        signal.setitimer(signal.ITIMER_PROF, self._seconds)

    def __enter__(self) -> Self:
        faulthandler.register(signal.SIGPROF, file=STANDARD_ERROR, all_threads=True, chain=True)
        self.wind_up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        signal.setitimer(signal.ITIMER_PROF, 0)
        faulthandler.unregister(signal.SIGPROF)
