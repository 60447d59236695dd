"""Ctrl-C: the first time it asks for an end after the step in progress, the second time it is one."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio

from oppo.errors import as_itself

ENDING = "ending after this step, then saving; press Ctrl-C again to end at once"
"""What whoever has pressed it once should know."""


@dataclass(slots=True)
class Interrupt:
    """Whether the run has been asked to end."""

    asked: bool = False


@asynccontextmanager
async def interruptible(*tell: Callable[[], None]) -> AsyncIterator[Interrupt]:
    """Yield what says whether Ctrl-C was pressed while the context is open; a second press ends it.

    Off the main thread there are no signals, and nothing is ever asked.

    Args:
        tell: each is called when the run is asked to end.

    Raises:
        KeyboardInterrupt: it was pressed a second time.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return

    async def listen(*, task_status: anyio.abc.TaskStatus[None]) -> None:
        with anyio.open_signal_receiver(signal.SIGINT) as presses:
            task_status.started()
            async for _ in presses:
                if interrupt.asked:
                    raise KeyboardInterrupt
                interrupt.asked = True
                for each in tell:
                    each()

    with as_itself():
        async with anyio.create_task_group() as tasks:
            await tasks.start(listen, name="listen to Ctrl-C")
            yield interrupt
            tasks.cancel_scope.cancel()
