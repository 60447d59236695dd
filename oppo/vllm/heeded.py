"""Signals while an engine starts: vLLM swallows a ``KeyboardInterrupt`` there, and would go on."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from oppo.signals import SIGNALS


class _Heard(BaseException):
    """A signal came; no ``KeyboardInterrupt``, so that nothing takes it for one."""

    def __init__(self, number: int, frame: FrameType | None) -> None:
        super().__init__(number)
        self.number = number
        self.frame = frame


@contextmanager
def heeded() -> Iterator[None]:
    """Let a signal end the body, and only then call its handler.

    Handlers of Python are replaced meanwhile; off the main thread there are none.

    Raises:
        KeyboardInterrupt: a signal came, and its handler raised nothing else.
    """
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in SIGNALS if on_main_thread}
    handlers = {number: handler for number, handler in before.items() if callable(handler)}

    def hear(number: int, frame: FrameType | None) -> None:
        raise _Heard(number, frame)

    for number in handlers:
        signal.signal(number, hear)
    try:
        try:
            yield
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
    except _Heard as heard:
        handlers[signal.Signals(heard.number)](heard.number, heard.frame)
        raise KeyboardInterrupt from None
