"""Places of several children, the ranks, wherever they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Concatenate, Generic, ParamSpec, TypeVar, cast

from oppo.errors import ProtocolError
from oppo.placement.answered_place import AnsweredPlace
from oppo.placement.callback import Callbacks
from oppo.placement.place import LocalInstance
from oppo.placement.rank_group import RankGroup
from oppo.placement.wire import Call, pack
from oppo.scheduling import Priority

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


class RankedPlace(AnsweredPlace[RankGroup]):
    """A place of several children, which make every call together."""

    @property
    def count(self) -> int:
        """The number of ranks."""
        return self._children.size

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of the child processes, by rank."""
        return self._children.pids

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
        ask = partial(self._children.ask, [packet] * self.count, f"{label!r} for {track!r}")
        return await self.answered(priority, track, label, lambda: self._children.create(call.instance) or ask())


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RanksInstance(LocalInstance[T], Generic[T]):
    """The handle to an instance whose copy in rank 0 shares memory with this process's."""

    place: RankedPlace
    number: int

    async def call(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        """Return ``work(instance, *args, **kwargs)`` of rank 0, made by every rank."""
        call = Call(self.number, work, args, kwargs)
        return cast("R", await self.place.call_in_ranks(self.priority, self.track, label, call))
