"""Where a model works: the contract of every place, and the places of this process: the caller, and a thread.

A place makes its calls one at a time, in the order of their priorities (:mod:`oppo.scheduling`).
"""

from __future__ import annotations

import asyncio
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from contextvars import Context, copy_context
from dataclasses import dataclass, replace
from typing import Concatenate, Generic, ParamSpec, Protocol, Self, TypeAlias, TypeVar, cast

import anyio.lowlevel

from oppo import observe
from oppo.errors import ModelError, ModelLost, running_loop
from oppo.log import with_route
from oppo.scheduling import DEFAULT_TIME_SLICE, IN_ORDER, CallQueue, Preempted, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
W = TypeVar("W")

Make: TypeAlias = Callable[[], T]
"""Makes an instance where it will live: a class, or a ``functools.partial`` of one, importable by name."""

Loaded: TypeAlias = Callable[[], object] | None
"""A function called after weights were loaded, before any later call to the instance."""


@dataclass(frozen=True, slots=True, eq=False)
class Hosted(Generic[T_co]):
    """The handle to an instance on the event loop: ``await hosted.call("extend", Reader.extend, events)``.

    Attributes:
        place: where it lives.
        track: of its spans.
    """

    place: Place
    track: str
    _here: T_co
    _priority: Priority = IN_ORDER
    _guard: Callable[[str], AbstractContextManager[object]] = nullcontext

    @property
    def time_slice(self) -> TimeSlice:
        """How long a call in this place should last that nothing waits for."""
        return self.place.time_slice

    @property
    def here(self) -> T_co:
        """The instance in this process: itself, or another that was made over the same memory.

        Raises:
            ModelError: it lives where memory is not shared.
        """
        return self._here

    def at(self, priority: Priority) -> Self:
        """Return a handle whose calls have this priority; calls of other handles are made in order of arrival.

        A place without a queue, such as :class:`~oppo.placement.Inline`, makes every call at once.
        """
        return replace(self, _priority=priority)

    def guarded(self, guard: Callable[[str], AbstractContextManager[object]]) -> Self:
        """Return a handle whose calls are made in the context of ``guard(label)``, around those that it has."""
        inner = self._guard

        @contextmanager
        def both(label: str) -> Iterator[None]:
            with guard(label), inner(label):
                yield

        return replace(self, _guard=both)

    async def call(
        self, label: str, work: Callable[Concatenate[T_co, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Return ``work(instance, *args, **kwargs)``, run where the instance lives.

        A call that has begun is waited for even when its caller is cancelled: no state is left half-changed.

        Args:
            label: of the call in traces and errors.
            work: a method of the instance's class, or another function of it.
            args, kwargs: its arguments; a :class:`~oppo.placement.Callback` stays with the caller.

        Raises:
            ModelLost: the place is closed, or its process died.
            SessionsLost: its process died, and another made the instance anew since the last call; this one was not
                made to its end.
            Preempted: the call is preemptible and was not made.
        """
        with self._guard(label):
            return cast("R", await self._call(label, work, args, kwargs))

    async def load(self, work: Callable[[T_co, W], object], weights: W, loaded: Loaded = None) -> None:
        """Give the instance weights, by ``work(instance, weights)``; the place makes no other call meanwhile.

        Where it shares its memory with this process, ``work`` runs here, on :attr:`here`, and nothing crosses.
        Otherwise the weights are sent, and a replacement gets the last ones.

        Args:
            work: a method of the instance's class.
            weights: tensors by name; a :class:`~oppo.placement.child.Bulk` where they are to be sent.
            loaded: called when it is done, and before the next call is made.
        """
        with self._guard("load"):
            await self._load(work, weights, loaded)

    async def _call(
        self, label: str, work: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        return await self.place.call_at(self._priority, self.track, label, work, self._here, *args, **kwargs)

    async def _load(self, work: Callable[..., object], weights: object, loaded: Loaded) -> None:
        def load() -> None:
            work(self._here, weights)
            if loaded is not None:
                loaded()

        await self.place.call_at(self._priority, self.track, "load", load)


class Hosting(Protocol):
    """Something that hosts instances: a place, or a wrapper of one, which returns the :class:`Hosted` of that place."""

    def host(self, make: Make[T], *, track: str = "") -> Hosted[T]:
        """Return the handle to an instance that is made where it lives.

        Args:
            make: makes the instance. It need not be thread-safe, as its calls are made one at a time. Memory that
                ``make`` holds (:class:`~oppo.placement.shared_memory.Block`) is shared, the rest pickled.
            track: of its spans; the name of the place when empty.

        Raises:
            ModelError: it cannot live there.
        """


class Closing(ABC):
    @abstractmethod
    def close(self) -> None:
        """End; idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class Place(Closing, Hosting):
    """A home for instances: it has a name, reports its calls, and is closed in the end.

    Args:
        name: shown in traces and errors, and in the list of threads or processes.

    Attributes:
        listener: called with the span of each call, in the thread that made it or waited for its answer.
        time_slice: how long a call in this place should last that nothing waits for.
        at_work: the call in progress, as ``track: label``; empty when there is none.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.listener: observe.SpanListener = observe.silent
        self.time_slice = DEFAULT_TIME_SLICE
        self.at_work = ""
        self._open = True

    @abstractmethod
    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run ``work`` in this process when it is the turn of a call with this priority; its span is on ``track``."""

    def host(self, make: Make[T], *, track: str = "") -> Hosted[T]:
        return Hosted(self, track or self.name, maker(make)())

    def close(self) -> None:
        """End the place after the call in progress and refuse further calls; idempotent."""
        self._open = False

    def _require_open(self, what: str, label: str) -> None:
        if not self._open:
            raise ModelLost(f"the {what} {self.name!r} is closed, so it cannot do {label!r}")

    @contextmanager
    def _reported(self, track: str, label: str, context: observe.WorkContext) -> Iterator[None]:
        start = observe.now()
        self.at_work = f"{track}: {label}"
        try:
            yield
        finally:
            self.at_work = ""
            self.listener(context.span(track, label, start, observe.now()))


def maker(make: Make[T]) -> Make[T]:
    if not callable(make):
        raise ModelError(
            f"expected a function that makes the instance where it lives, such as functools.partial(Worker, path); got "
            f"an object of {type(make).__name__}"
        )
    return make


class Inline(Place):
    """The caller's own thread, for tests and for short calls: a longer one holds up the event loop.

    Example:
        >>> async def main() -> int:
        ...     return await Inline("length").host(list).call("measure", len)
        >>> anyio.run(main)
        0
    """

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        # There is no queue: each call is made at once, whatever its priority.
        del priority
        self._require_open("place", label)
        await anyio.lowlevel.checkpoint()  # other tasks take a turn before the loop is held up
        with self._reported(track, label, observe.work_context()):
            return work(*args, **kwargs)


class Thread(Place):
    """One thread, for one model or shared by several.

    Args:
        name: see :class:`Place`.
        setup: called once in the thread before anything else, for example to set the intra-op thread count; its error
            is the error of the first call, and the next call tries again.

    Example:
        >>> async def main() -> int:
        ...     with Thread("reward") as thread:
        ...         return await thread.call("add", int.__add__, 1, 2)
        >>> anyio.run(main)
        3
    """

    def __init__(self, name: str, *, setup: Callable[[], None] | None = None) -> None:
        super().__init__(name)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=f"oppo-{name}")
        self._setup = setup
        self._calls = CallQueue()

    async def call(self, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run ``work`` in the thread and return its result.

        A call is waited for even when its caller is cancelled: no state is left half-changed.
        """
        return await self.call_at(IN_ORDER, self.name, label, work, *args, **kwargs)

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        running_loop()
        self._require_open("thread of", label)
        future = self._queued(priority, track, label, with_route(lambda: work(*args, **kwargs)))
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
    # A cancellation from outside of anyio that came meanwhile is raised after the result.
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


async def run_detached(name: str, work: Callable[[], R]) -> R:
    """Run ``work`` in a daemon thread, in the caller's context.

    A caller may give up: the thread then goes on, and keeps neither the run nor the process from ending.
    """
    return await result_of(in_thread(name, work))


def in_thread(name: str, work: Callable[[], R]) -> Future[R]:
    context, outcome = _context_without_loop(), Future[R]()

    def run() -> None:
        try:
            outcome.set_result(context.run(work))
        except BaseException as error:  # noqa: BLE001 - raised by the task that waits for it
            outcome.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return outcome


async def result_of(outcome: Future[R]) -> R:
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
