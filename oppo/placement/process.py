"""Calls in a child process, which has an interpreter, and so an interpreter lock, of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

from oppo import observe
from oppo.placement.place import Hosted, Journal, LocalInstance
from oppo.placement.recipe import Recipe, made
from oppo.placement.supervised_place import SupervisedPlace
from oppo.placement.supervised_process import HostedInstance, SupervisedProcess
from oppo.placement.wire import Call
from oppo.scheduling import DEFAULT_TIME_SLICE, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Process(SupervisedPlace):
    """One child process, owned by one model or shared by several that should take turns on the same cores.

    An instance is pickled when it is hosted, and unpickled in the child at its first call. Its methods are called in
    one thread, in the order of their priorities (:mod:`oppo.scheduling`). Spans are timed by the child, on the clock
    that both processes share. Errors come back as themselves. The child writes to the parent's output, ignores Ctrl-C
    and dies with its parent.

    If the child dies, the call in progress and every later one raise :class:`~oppo.errors.ModelLost`. With ``restarts``
    another child is started instead: it unpickles the instances again, replays their journals and repeats the call.
    What they have in shared memory survives.

    Args:
        name, listener, time_slice: see :class:`Place`.
        setup: called once in the child before anything else, for example
            ``functools.partial(oppo.hf.devices.use_cores, 1)``; importable by name.
        restarts: how many dead children are replaced in an hour; above 0, calls with callbacks are refused.
        tell: called with a sentence about each restart, from another thread.

    Raises:
        ModelError: ``setup`` cannot go to another process.

    Example:
        >>> async def main() -> int:
        ...     with Process("length") as process:
        ...         return await process.host("abc").call("measure", len)
        >>> anyio.run(main)
        3
    """

    what = "process"

    def __init__(
        self,
        name: str,
        *,
        listener: observe.SpanListener = observe.silent,
        setup: Callable[[], object] | None = None,
        restarts: int = 0,
        tell: Callable[[str], None] = observe.silent,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
    ) -> None:
        child = SupervisedProcess(name, setup=setup, restarts=restarts, tell=tell)
        super().__init__(name, child, listener=listener, time_slice=time_slice)

    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Host ``instance`` in the child; this object itself, or what its recipe makes, stays here too.

        See :meth:`SupervisedPlace.host`.
        """
        here = made(instance)
        hosted = self._children.host(here, track or self.name, journal)
        return _ChildInstance(here, hosted.track, place=self, hosted=hosted)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _ChildInstance(LocalInstance[T], Generic[T]):
    place: Process
    hosted: HostedInstance

    async def call(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        call = Call(self.hosted.number, work, args, kwargs)
        return cast("R", await self.place.call_in_child(self.priority, self.hosted, label, call))
