"""Calls of foreign code, which may never return, in daemon threads or processes: a cancelled caller does not wait."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from threading import Lock, Thread
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

import anyio

from oppo.errors import ModelLost, running_loop
from oppo.placement.child import Gone
from oppo.placement.child_process import ChildProcess
from oppo.placement.wire import Call, Create, Packet, pack, pack_with_blocks

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


async def run_detached(name: str, work: Callable[[], R]) -> R:
    """Run ``work`` in a daemon thread, in the caller's context, and return what it returns or raise what it raises.

    A cancelled caller abandons the thread, which keeps neither the run nor the process from ending. Nothing bounds the
    number of threads but what bounds the callers.

    Args:
        name: shown in the thread list.
        work: a call without arguments.
    """
    loop, context = running_loop(), _context_without_loop()
    outcome: Future[R] = Future()
    over = asyncio.Event()

    def run() -> None:
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            outcome.set_exception(error)
        with suppress(RuntimeError):  # the loop is closed: the caller is gone
            loop.call_soon_threadsafe(over.set)

    Thread(target=run, name=name, daemon=True).start()
    await over.wait()
    return outcome.result()


def _context_without_loop() -> Context:
    """Return a copy of the caller's context in which sniffio finds no event loop."""
    context = copy_context()
    if (sniffio := sys.modules.get("sniffio")) is not None:
        context.run(sniffio.current_async_library_cvar.set, None)
    return context


class DisposableProcess(Generic[T]):
    """An object in a child process of its own, for code that may also hold the interpreter lock or crash.

    Calls are made one at a time. The first starts the child; after the child died, the next starts another.

    Args:
        name: shown in errors and the list of processes.
        instance: can be pickled, importable by name.

    Raises:
        ModelError: it cannot go to another process.
    """

    def __init__(self, name: str, instance: T) -> None:
        self._name = name
        self._create = pack_with_blocks(Create(0, instance))
        self._child: _LazyChild | None = None
        self._turn = anyio.Lock()

    async def call(self, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return ``work(instance, *args, **kwargs)``; a cancelled call kills the child.

        Raises:
            ModelLost: the child died.
            Exception: whatever ``work`` raised.
        """
        packet = pack(Call(0, work, args, kwargs))
        async with self._turn:
            child = self._child = self._child or _LazyChild(self._name, self._create)
            try:
                return cast("R", await run_detached(f"oppo-{self._name}", partial(child.ask, packet)))
            except Gone as gone:
                self.close()
                raise ModelLost(f"the process of {self._name!r} {gone}") from None
            except anyio.get_cancelled_exc_class():
                self.close()
                raise

    def close(self) -> None:
        """Kill the child, whatever it is doing; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()


class _LazyChild:
    """A child that the first order starts; ``kill`` may come before, during or after that, from another thread."""

    def __init__(self, name: str, create: Packet) -> None:
        self._name = name
        self._create = create
        self._child: ChildProcess | None = None
        self._killed = False
        self._lock = Lock()

    def ask(self, packet: Packet) -> object:
        """Return what an order returns.

        Raises:
            Gone: the child is dead, or dies meanwhile.
        """
        if self._child is None:
            with self._lock:
                if self._killed:
                    raise Gone("was killed before it started")
                self._child = ChildProcess(self._name, None)
            self._child.ask(self._create).result(self._name)
        return self._child.ask(packet).result(self._name)

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()
