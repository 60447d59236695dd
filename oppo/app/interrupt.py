"""Ctrl-C, SIGTERM and SIGHUP: the first asks for an end after the step in progress, the second is one."""

from __future__ import annotations

import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType

import anyio

from oppo.errors import running_loop

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent by a terminal, by a scheduler that wants its machine back, and by a terminal that is closed."""


class Stopped(KeyboardInterrupt):
    """A signal has ended a run.

    Attributes:
        by: the signal.
    """

    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by.name)
        self.by = by


@dataclass(slots=True)
class Interrupt:
    """Whether the run has been asked to end, and by which signal."""

    asked: signal.Signals | None = None


@asynccontextmanager
async def interruptible(*tell: Callable[[signal.Signals], None]) -> AsyncIterator[Interrupt]:
    """Yield what says whether a signal has come while the context is open; a second one ends the context.

    Off the main thread there are no signals, and nothing is ever asked. Signals that the process ignores, as SIGHUP
    under ``nohup``, stay ignored.

    Args:
        tell: each is called on the event loop when the run is asked to end.

    Raises:
        Stopped: a second signal came. While something blocks the event loop it is raised there.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    loop, heard = running_loop(), threading.Event()

    def hear(number: signal.Signals) -> None:
        heard.set()
        for each in tell:
            each(number)

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if interrupt.asked is None:
            interrupt.asked = signal.Signals(number)
            loop.call_soon_threadsafe(hear, interrupt.asked)
        elif heard.is_set():
            loop.call_soon_threadsafe(scope.cancel)
        else:  # something blocks the loop, in this thread
            scope.cancel()
            raise Stopped(interrupt.asked)

    with anyio.CancelScope() as scope, _handling(on_signal):
        yield interrupt
    if scope.cancelled_caught and interrupt.asked is not None:
        raise Stopped(interrupt.asked)


@contextmanager
def stoppable() -> Iterator[None]:
    """Let a signal raise :class:`Stopped` while the context is open, as Ctrl-C raises ``KeyboardInterrupt``.

    For what a program does outside of :func:`interruptible`; off the main thread nothing changes.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        raise Stopped(signal.Signals(number))

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handling(stop):
        yield


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    before = {
        number: signal.signal(number, handler) for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
