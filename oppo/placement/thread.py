"""Calls in one thread for life: a model's intra-op settings and its state belong to that thread."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import ParamSpec, TypeVar

import anyio

from oppo import observe
from oppo.errors import running_loop
from oppo.placement.call_queue import CallQueue
from oppo.placement.place import Place
from oppo.scheduling import DEFAULT_TIME_SLICE, IN_ORDER, Preempted, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")


class Thread(Place):
    """One thread, owned by one model or shared by several that should take turns on the same cores.

    Args:
        name, listener, time_slice: see :class:`Place`.
        setup: called once in the thread before anything else, for example to set the intra-op thread count; its error
            is the error of the first call, and the next call tries again.

    Example:
        >>> async def main() -> int:
        ...     with Thread("reward") as thread:
        ...         return await thread.call("add", int.__add__, 1, 2)
        >>> anyio.run(main)
        3
    """

    def __init__(
        self,
        name: str,
        *,
        listener: observe.SpanListener = observe.silent,
        setup: Callable[[], None] | None = None,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
    ) -> None:
        super().__init__(name, listener=listener, time_slice=time_slice)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"oppo-{name}")
        self._setup = setup
        self._calls = CallQueue()

    async def call(self, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``work`` in the thread and return what it returns.

        A call is waited for even when its caller is cancelled, by a scope or, as by Ctrl-C, without one: no state is
        left half-changed.

        Raises:
            ModelLost: the thread is closed.
        """
        return await self.call_at(IN_ORDER, self.name, label, work, *args, **kwargs)

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Do the same with a priority, for one of several models that share the thread; see :meth:`Place.call_at`."""
        running_loop()
        self._require_open("thread of", label)
        future = self._queued(priority, track, label, lambda: work(*args, **kwargs))
        with anyio.CancelScope(shield=True):
            result = await _outlasting(asyncio.wrap_future(future))
        await anyio.lowlevel.checkpoint_if_cancelled()
        return result

    def _queued(self, priority: Priority, track: str, label: str, work: Callable[[], R]) -> Future[R]:
        future, context = Future[R](), observe.work_context()

        def run() -> None:
            try:
                if self._setup is not None:
                    self._setup()
                    self._setup = None
                with self._reported(track, label, context):
                    result = work()
            except BaseException as error:  # noqa: BLE001 - raised where the call is waited for
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(run, lambda: future.set_exception(Preempted()), priority)
        self._pool.submit(self._run_next)
        return future

    def _run_next(self) -> None:
        if (begin := self._calls.take()) is not None:
            begin()

    def close(self) -> None:
        """End the thread after the calls that are queued; idempotent."""
        super().close()
        self._calls.close()
        self._pool.shutdown(wait=True)


async def _outlasting(future: asyncio.Future[R]) -> R:
    """Return the result of ``future``; a cancellation from outside of anyio that came meanwhile is raised then."""
    cancelled: asyncio.CancelledError | None = None
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError as error:
            cancelled = error
    result = future.result()
    if cancelled is not None:
        raise cancelled
    return result
