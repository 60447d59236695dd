"""Writing beside the run: one thread does jobs in the order in which they were given, a bounded number behind."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

Job: TypeAlias = Callable[[], None]


class Writer:
    """Does jobs in order, in a thread of its own or at once.

    A job that fails stops the writer: nothing is written after a gap, and the failure is raised by the next
    :meth:`submit` and by :meth:`close`.

    Args:
        threaded: use a thread; without one a job is done when it is submitted, as virtual time needs it.
        capacity: jobs that may wait; with more, :meth:`submit` blocks until the disk has caught up.
    """

    def __init__(self, *, threaded: bool = True, capacity: int = 4096) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(capacity)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="oppo-writer", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, job: Job) -> None:
        """Have ``job`` done after those submitted before it.

        Raises:
            BaseException: what an earlier job raised.
        """
        self._raise()
        if self._thread is None:
            self._do(job)
            self._raise()
        else:
            self._jobs.put(job)

    def flush(self) -> None:
        """Return when every job submitted so far is done or, after a failure, dropped; blocks.

        Raises:
            BaseException: what a job raised.
        """
        self._jobs.join()
        self._raise()

    def close(self) -> None:
        """Return when every job is done; idempotent.

        Raises:
            BaseException: what a job raised.
        """
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
        self._raise()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self._do(job)
            self._jobs.task_done()
        self._jobs.task_done()

    def _do(self, job: Job) -> None:
        if self._error is None:
            try:
                job()
            except BaseException as error:  # noqa: BLE001 - handed to the submitter, who raises it
                self._error = error
