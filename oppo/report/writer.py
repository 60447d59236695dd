"""Writes files beside the run: one thread does jobs in order, from a bounded queue."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeAlias

Job: TypeAlias = Callable[[], object]


class Writer:
    """Does jobs in order, in a thread of its own or at once.

    A job that fails stops the writer, so that nothing is written after a gap. The next :meth:`submit` and
    :meth:`close` raise its error.

    Args:
        threaded: use a thread; otherwise :meth:`submit` does the job itself, as virtual time needs it.
        capacity: jobs that may wait; :meth:`submit` blocks while the queue is full.
    """

    def __init__(self, *, threaded: bool = True, capacity: int = 4096) -> None:
        self._jobs: queue.Queue[Job | None] = queue.Queue(capacity)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._work, name="oppo-writer", daemon=True) if threaded else None
        if self._thread is not None:
            self._thread.start()

    def submit(self, job: Job) -> None:
        """Do ``job`` after those submitted before it.

        Raises:
            BaseException: an earlier job raised it.
        """
        self._raise()
        if self._thread is None:
            self._do(job)
            self._raise()
        else:
            self._jobs.put(job)

    def flush(self) -> None:
        """Block until every job submitted so far is done or, after a failure, dropped.

        Raises:
            BaseException: a job raised it.
        """
        self._jobs.join()
        self._raise()

    def close(self) -> None:
        """Block until every job is done, and end the thread; idempotent.

        Raises:
            BaseException: a job raised it.
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
            except BaseException as error:  # noqa: BLE001 - the submitter raises it
                self._error = error
