"""Calls of foreign code, which may never return, in daemon threads or processes: a cancelled caller does not wait."""

from __future__ import annotations

import asyncio
import math
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from contextvars import Context, copy_context
from functools import partial
from threading import Lock, Thread
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

import anyio

from oppo.errors import ModelLost, running_loop
from oppo.placement.process import ChildProcess, Gone
from oppo.placement.wire import Call, Create, Packet, pack, pack_with_blocks
from oppo.placement.worker import heed_interrupts

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

GRACE = 2.0
"""Seconds in which a call of a child that has been interrupted must end."""


async def run_detached(name: str, work: Callable[[], R]) -> R:
    """Run ``work`` in a daemon thread, in the caller's context.

    A caller may give up: the thread then goes on, and keeps neither the run nor the process from ending.
    """
    return await _result(in_thread(name, work))


def in_thread(name: str, work: Callable[[], R]) -> Future[R]:
    """Run ``work`` as :func:`run_detached` does, for a caller on no event loop."""
    context, outcome = _context_without_loop(), Future[R]()

    def run() -> None:
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - who waits for it raises it
            outcome.set_exception(error)

    Thread(target=run, name=name, daemon=True).start()
    return outcome


async def _result(outcome: Future[R]) -> R:
    loop, over = running_loop(), asyncio.Event()

    def wake(_: object) -> None:
        with suppress(RuntimeError):  # the loop is closed: nothing waits any more
            loop.call_soon_threadsafe(over.set)

    outcome.add_done_callback(wake)
    await over.wait()
    return outcome.result()


def _context_without_loop() -> Context:
    # sniffio finds no event loop in it.
    context = copy_context()
    if (sniffio := sys.modules.get("sniffio")) is not None:
        context.run(sniffio.current_async_library_cvar.set, None)
    return context


class DisposableProcess(Generic[T]):
    """An object in a child process of its own, for code that may also hold the interpreter lock or crash.

    Calls are made one at a time. The first starts the child, unless :meth:`start` has; the next replaces a dead one.

    Args:
        instance: can be pickled, importable by name.
        timeout: seconds of a call, without the start. The call is then interrupted; a child that goes on for
            :data:`GRACE` is killed.
    """

    def __init__(self, name: str, instance: T, *, timeout: float = math.inf) -> None:
        self._name = name
        self._timeout = timeout
        self._create = pack_with_blocks(Create(0, partial(_itself, instance)))
        self._child: _LazyChild | None = None
        self._turn = anyio.Lock()

    async def start(self) -> None:
        async with self._turn:
            await self._started()

    async def call(self, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        packet = pack(Call(0, work, args, kwargs))
        async with self._turn:
            child = await self._started()
            with self._disposed_of():
                asked = in_thread(f"oppo-{self._name}", partial(child.ask, packet))
                with anyio.move_on_after(self._timeout):
                    return cast("R", await _result(asked))
                child.interrupt()
                with anyio.move_on_after(GRACE) as grace, suppress(Exception):
                    await _result(asked)
                if grace.cancelled_caught or child.gone:
                    self.close()
                raise TimeoutError

    async def _started(self) -> _LazyChild:
        if self._child is None:
            child = self._child = _LazyChild(self._name)
            with self._disposed_of(Exception):
                await run_detached(f"oppo-{self._name}", partial(child.start, self._create))
            return child
        return self._child

    @contextmanager
    def _disposed_of(self, *errors: type[Exception]) -> Iterator[None]:
        # Kills the child where the body is cancelled, the child is found dead, or one of ``errors`` is raised.
        try:
            yield
        except Gone as gone:
            self.close()
            raise ModelLost(f"the process of {self._name!r} {gone}") from None
        except (anyio.get_cancelled_exc_class(), *errors):
            self.close()
            raise

    def close(self) -> None:
        """Kill the child, whatever it is doing; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()


def _itself(instance: T) -> T:
    return instance


class _LazyChild:
    """A child that :meth:`start` starts; ``kill`` may come before, during or after that, from another thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._child: ChildProcess | None = None
        self._killed = False
        self._lock = Lock()
        self.gone = False

    def start(self, create: Packet) -> None:
        with self._lock:
            if self._killed:
                raise Gone("was killed before it started")
            self._child = ChildProcess(self._name, heed_interrupts)
        self.ask(create)

    def ask(self, packet: Packet) -> object:
        assert self._child is not None  # noqa: S101 - it has been started
        try:
            return self._child.ask(packet).result(self._name)
        except Gone:
            self.gone = True
            raise

    def interrupt(self) -> None:
        if self._child is not None:
            self._child.interrupt()

    def kill(self) -> None:
        with self._lock:
            self._killed = True
            if self._child is not None:
                self._child.kill()
