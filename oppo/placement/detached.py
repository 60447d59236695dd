"""Calls of foreign code, which may never return, in daemon threads: a caller that is cancelled does not wait."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, copy_context
from threading import Thread
from typing import TypeVar

import anyio.to_thread

from oppo.errors import running_loop

R = TypeVar("R")


async def run_detached(name: str, work: Callable[[], R]) -> R:
    """Run ``work`` in a daemon thread, in the caller's context, and return what it returns or raise what it raises.

    A caller that is cancelled abandons the thread, which keeps neither the run nor the process from ending. At most as
    many callers wait at a time as :func:`anyio.to_thread.run_sync` lets.

    Args:
        name: shown in the thread list.
        work: a call without arguments.
    """
    loop, context = running_loop(), _outside()
    outcome: Future[R] = Future()
    over = asyncio.Event()

    def do() -> None:
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            outcome.set_exception(error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(over.set)

    async with anyio.to_thread.current_default_thread_limiter():
        Thread(target=do, name=name, daemon=True).start()
        await over.wait()
    return outcome.result()


def _outside() -> Context:
    """Return a copy of the caller's context in which no event loop is said to run."""
    context = copy_context()
    if (sniffio := sys.modules.get("sniffio")) is not None:
        context.run(sniffio.current_async_library_cvar.set, None)
    return context
