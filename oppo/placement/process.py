"""Work done in a child process, which has an interpreter, and so an interpreter lock, of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from oppo import observe
from oppo.errors import ModelLost
from oppo.placement.callback import Callbacks
from oppo.placement.place import Hosted, Journal, reported
from oppo.placement.supervised_process import HostedInstance, SupervisedProcess
from oppo.placement.thread import Thread
from oppo.placement.wire import Call, Failure, pack, pack_with_blocks
from oppo.scheduling import DEFAULT_TIME_SLICE, IN_ORDER, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Process:
    """One child process, owned by one model or shared by several that should take turns on the same cores.

    A instance goes there pickled, as it is when it is hosted, and is made there when it is first called. Its methods
    are called in one thread, in the order of their priorities (:mod:`oppo.scheduling`).
    Spans are the child's, on the clock that both processes share. Errors come back as themselves. The child writes to
    the parent's output, leaves Ctrl-C to it, and dies with it.

    A child that dies is :class:`~oppo.errors.ModelLost` for the call in progress at once, and for every later one. With
    ``restarts`` it is started again instead: its instances are made again, are told what their journals hold, and the
    call is repeated. What they have in shared memory is still there.

    Args:
        name: shown in traces, errors and the list of processes.
        listener: called, from a thread of this process, with the span of each call.
        setup: called once in the child before anything else, for example
            ``functools.partial(oppo.hf.cpu.use_cores, 1)``; importable by name.
        restarts: how many dead children are replaced in an hour; above 0, calls with callbacks are refused.
        tell: told, in a sentence, of each child that is replaced; from another thread.
        time_slice: how long a call in the child should last that nobody waits for.

    Raises:
        ModelError: ``setup`` cannot go to another process.

    Example:
        >>> async def main() -> int:
        ...     with Process("length") as process:
        ...         return await process.host("abc").call("measure", len)
        >>> anyio.run(main)
        3
    """

    def __init__(
        self,
        name: str,
        *,
        listener: observe.SpanListener = observe.ignore,
        setup: Callable[[], object] | None = None,
        restarts: int = 0,
        tell: Callable[[str], None] = observe.silent,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
    ) -> None:
        self.name = name
        self.listener = listener
        self.time_slice = time_slice
        self.at_work = ""
        self._open = True
        self._child = SupervisedProcess(name, setup=setup, restarts=restarts, tell=tell)
        self._thread = Thread(name)  # waits for answers

    @property
    def pid(self) -> int:
        """The number of the child process."""
        return self._child.pid

    def host(self, instance: T, *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Give ``instance`` a home in the child.

        Args:
            instance: can be pickled; the one given stays here, for :meth:`Hosted.call_local`.
            track: of its spans; the name of the place when empty.
            journal: what a instance of a new child is told; without one it begins anew.

        Raises:
            ModelError: it cannot go to another process.
        """
        return _ProcessHosted(self, self._child.admit(instance, track or self.name, journal), instance)

    def wait_until_ready(self) -> None:
        """Return when every instance is made in the child; without this, each is at its first call.

        Raises:
            ModelLost: the child died once too often.
            Exception: ``setup`` or the making of a instance failed.
        """
        self._child.wait_until_ready()

    async def ask(self, entry: HostedInstance, label: str, order: Call, priority: Priority = IN_ORDER) -> object:
        """Return what an order to a instance comes to.

        Raises:
            ModelLost: the place is closed, or its child died once too often.
            Preempted: the order is preemptible and was not given.
            Exception: whatever the order came to.
        """

        def answer() -> object:
            self.at_work = f"{entry.track}: {label}"
            try:
                answer = self._child.answer(entry, label, order, packet, callbacks)
            finally:
                self.at_work = ""
            self.listener(observe.Span(entry.track, label, answer.start, answer.end))
            if isinstance(answer, Failure):
                raise answer.told_of(self.name)
            return answer.value

        callbacks = Callbacks()
        args = tuple(map(callbacks.stub, order.args))
        kwargs = {name: callbacks.stub(value) for name, value in order.kwargs.items()}
        order = replace(order, args=args, kwargs=kwargs)
        packet = pack_with_blocks(order) if callbacks else pack(order)
        return await self._waited_for(label, answer, priority)

    async def call_local(
        self, entry: HostedInstance, label: str, work: Callable[[], R], priority: Priority = IN_ORDER
    ) -> R:
        """Return what ``work`` returns, done in this process while the child rests.

        Raises:
            ModelLost: the place is closed.
            Preempted: the call is preemptible and was not made.
        """

        def reporting() -> R:
            with reported(self, entry.track, label):
                return work()

        return await self._waited_for(label, reporting, priority)

    async def _waited_for(self, label: str, work: Callable[[], R], priority: Priority) -> R:
        if not self._open:
            raise ModelLost(f"the process of {self.name!r} is closed, so it cannot do {label!r}")
        return await self._thread.call_at(priority, self.name, label, work)

    def abort(self) -> None:
        """Kill the child, whatever it is doing: the call in progress, and every later one, is ``ModelLost``."""
        self._child.abort()

    def close(self) -> None:
        """End the child after the call in progress; idempotent."""
        self._open = False
        self._thread.close()
        self._child.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()


class _ProcessHosted(Generic[T]):
    def __init__(self, process: Process, entry: HostedInstance, instance: T, priority: Priority = IN_ORDER) -> None:
        self._process = process
        self._entry = entry
        self._instance = instance
        self._priority = priority

    @property
    def time_slice(self) -> TimeSlice:
        return self._process.time_slice

    def at(self, priority: Priority) -> Hosted[T]:
        return _ProcessHosted(self._process, self._entry, self._instance, priority)

    async def call(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        order = Call(self._entry.number, work, args, kwargs)
        return cast("R", await self._process.ask(self._entry, label, order, self._priority))

    async def call_local(
        self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        return await self._process.call_local(
            self._entry, label, lambda: work(self._instance, *args, **kwargs), self._priority
        )
