"""The guard of a child process: it dies with its parent, whatever it is doing."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
from typing import NoReturn


def die_with(lifeline: int) -> None:
    """Kill this process when the last process that could write to the pipe ``lifeline`` has closed it or is dead."""
    # On Linux the system itself sends the signal, so code that holds the interpreter lock dies too. PR_SET_PDEATHSIG
    # would not do: it follows the thread that started this process, which may end long before its process.
    hang_up = select.poll()
    hang_up.register(lifeline, 0)  # reports a hang-up only
    if sys.platform != "linux":
        threading.Thread(target=_exit_after, args=(hang_up,), name="oppo-lifeline", daemon=True).start()
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    if hang_up.poll(0):  # it came before there was an owner to kill
        exit_at_once()


def exit_at_once() -> NoReturn:
    # There is nothing to save, and an orderly shutdown with torch loaded takes seconds.
    os._exit(0)


def _exit_after(hang_up: select.poll) -> None:
    hang_up.poll()
    exit_at_once()
