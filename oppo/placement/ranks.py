"""Calls that several child processes make together, each on its own copy of the instance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

from oppo import observe
from oppo.errors import ProtocolError
from oppo.numeric import require_whole
from oppo.placement.answered_place import AnsweredPlace
from oppo.placement.callback import Callbacks
from oppo.placement.place import Hosted, Journal, LocalInstance
from oppo.placement.rank_group import RankGroup
from oppo.placement.wire import Call, pack
from oppo.scheduling import DEFAULT_TIME_SLICE, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class Ranks(AnsweredPlace):
    """Several child processes, the ranks, for an instance that shares its work out among its copies.

    Each rank unpickles the instance at its first call, and the copies meet (:class:`~oppo.placement.Member`). All ranks
    make every call, with the same arguments; its result, its error and its span are those of rank 0. The ranks are
    children like that of a :class:`~oppo.placement.Process`: they ignore Ctrl-C and die with their parent.

    A rank that dies ends the others, which would wait for it forever: the call in progress and every later one raise
    :class:`~oppo.errors.ModelLost`. So does a rank that fails alone. An error of all ranks leaves the place as it is.

    Args:
        name, listener, time_slice: see :class:`Place`.
        count: of ranks, at least 1.
        setup: called once in each rank before anything else; importable by name.

    Raises:
        ModelError: ``setup`` cannot go to another process.

    Example:
        >>> with Ranks("trainer", 2) as ranks:  # doctest: +SKIP
        ...     trainer = hf.HfTrainer(actor, critic, sampling=sampling, thread=ranks)
    """

    what = "group of ranks"

    def __init__(
        self,
        name: str,
        count: int,
        *,
        listener: observe.SpanListener = observe.silent,
        setup: Callable[[], object] | None = None,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
    ) -> None:
        super().__init__(name, listener=listener, time_slice=time_slice)
        require_whole("ranks", count, 1)
        self.count = count
        self._group = RankGroup(name, count, setup)

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of the child processes, by rank."""
        return self._group.pids

    def host(self, instance: T, *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Host a copy of ``instance`` in every rank; nothing is restarted, so ``journal`` records nothing.

        Raises:
            ModelError: it is no :class:`~oppo.placement.Member`, or cannot go to another process.
        """
        del journal
        return _RanksInstance(instance, track or self.name, place=self, number=self._group.host(instance))

    def wait_until_ready(self) -> None:
        """Return when every rank holds every instance; see :meth:`AnsweredPlace.wait_until_ready`."""
        if (failure := self._group.create()) is not None:
            failure.result(self.name)

    async def call_in_ranks(self, priority: Priority, track: str, label: str, call: Call) -> object:
        """Return what a call returns in rank 0, made by every rank.

        Raises:
            ModelLost: the place is closed, or a rank died or failed alone.
            Preempted: the call is preemptible and was not made.
            ProtocolError: the call has callbacks.
            Exception: whatever the call raised in rank 0.
        """
        callbacks = Callbacks()
        packet = pack(callbacks.extract(call))
        if callbacks:
            raise ProtocolError(f"{label!r} for {track!r} calls back, and ranks cannot: expected a Process or a Thread")
        ask = partial(self._group.ask, [packet] * self.count, f"{label!r} for {track!r}")
        return await self.answered(priority, track, label, lambda: self._group.create(call.instance) or ask())

    def abort(self) -> None:
        """Kill the ranks, whatever they are doing: the call in progress and every later one raise ``ModelLost``."""
        self._group.abort()

    def end(self) -> None:
        """End the ranks; idempotent."""
        self._group.close()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _RanksInstance(LocalInstance[T], Generic[T]):
    place: Ranks
    number: int

    async def call(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        call = Call(self.number, work, args, kwargs)
        return cast("R", await self.place.call_in_ranks(self.priority, self.track, label, call))
