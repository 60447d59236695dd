"""The signals that ask a program to end: the first ends a run after the steps in flight, the second at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Final

import anyio

from oppo.errors import running_loop

SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Sent by a terminal, by a job scheduler, and by a terminal that is closed."""


class Stopped(KeyboardInterrupt):
    def __init__(self, by: signal.Signals) -> None:
        super().__init__(by.name)
        self.by = by


@dataclass(slots=True)
class Interrupt:
    by: signal.Signals | None = None


@asynccontextmanager
async def interruptible(*listeners: Callable[[signal.Signals], None]) -> AsyncIterator[Interrupt]:
    """Yield the interrupt that records the first signal; a second one ends the context."""
    # off the main thread no signal arrives; signals that the process ignores, as SIGHUP under `nohup`, stay ignored
    interrupt = Interrupt()
    loop, loop_ran = running_loop(), threading.Event()  # since the last signal

    def notify(number: signal.Signals) -> None:
        loop_ran.set()
        for listener in listeners:
            listener(number)

    def end() -> None:
        loop_ran.set()
        scope.cancel()

    def on_signal(number: int, frame: FrameType | None) -> None:
        del frame
        if interrupt.by is None:
            interrupt.by = signal.Signals(number)
            loop.call_soon_threadsafe(notify, interrupt.by)
        elif loop_ran.is_set():
            loop_ran.clear()
            loop.call_soon_threadsafe(end)
        else:  # the interrupted code blocks the loop, which runs in this thread
            scope.cancel()
            raise Stopped(interrupt.by)

    notes: list[str] = []
    with anyio.CancelScope() as scope, _handling(on_signal):
        try:
            yield interrupt
        except BaseException as error:
            notes += getattr(error, "__notes__", ())
            raise
    if scope.cancelled_caught and interrupt.by is not None:
        stopped = Stopped(interrupt.by)
        for note in notes:
            stopped.add_note(note)
        raise stopped


@contextmanager
def stoppable() -> Iterator[None]:
    """Let a signal end the body with :class:`Stopped`, wherever it is; for code outside of :func:`interruptible`."""
    # an event loop in the body has its tasks cancelled: an exception between two of them would leave it in disorder;
    # a second signal is raised in the code that blocks it
    came: list[signal.Signals] = []

    def stop(number: int, frame: FrameType | None) -> None:
        del frame
        came.append(signal.Signals(number))
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            raise Stopped(came[0]) from None
        if len(came) > 1:
            raise Stopped(came[0])
        loop.call_soon_threadsafe(_cancel_all, loop)

    try:
        with _handling(stop):
            yield
    except asyncio.CancelledError as error:
        if not came:
            raise
        raise Stopped(came[0]) from error


def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    for task in asyncio.all_tasks(loop):
        task.cancel()


@contextmanager
def _handling(handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    on_main_thread = threading.current_thread() is threading.main_thread()
    handled = [number for number in SIGNALS if on_main_thread and signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, handler) for number in handled}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
