"""A place whose child shares no memory with this process: what it needs is sent, weights too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from oppo.errors import ModelError
from oppo.placement.mirrored import Gauge
from oppo.placement.place import Hosted, Journal
from oppo.placement.recipe import Recipe, kind_of
from oppo.placement.supervised_place import SupervisedPlace
from oppo.placement.supervised_process import HostedInstance
from oppo.placement.wire import Answer, Call, Outcome, Packet, pack_with_blocks, pack_with_bulk
from oppo.scheduling import IN_ORDER, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")


class RemotePlace(SupervisedPlace):
    """A place of one child on another machine, or as if it were.

    Instances cross as recipes, or pickled if they hold no shared memory. The weights that one is given cross too, and
    the last ones are kept for its replacement.
    """

    def stored(self, packet: Packet) -> Packet:
        """Return ``packet`` with its bulk where the child can read it as often as it is asked to."""
        return packet

    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Host ``instance`` in the child; see :meth:`SupervisedPlace.host`.

        Raises:
            ModelError: it holds memory of this process, or cannot go to another process.
        """
        require_portable(instance, self.name)
        return _RemoteInstance(self, self._children.host(instance, track or self.name, journal))

    async def load_in_child(
        self, priority: Priority, hosted: HostedInstance, call: Call, loaded: Callable[[], object] | None
    ) -> None:
        """Make a call with weights in the child; they are sent once, however often it is made."""

        def load() -> Outcome:
            outcome = self._children.load(hosted, "load", self.stored(pack_with_bulk(call)))
            if loaded is not None and isinstance(outcome, Answer):
                loaded()
            return outcome

        await self.answered(priority, hosted.track, "load", load)


@dataclass(frozen=True, slots=True, eq=False)
class _RemoteInstance(Generic[T]):
    place: RemotePlace
    hosted: HostedInstance
    priority: Priority = IN_ORDER

    @property
    def time_slice(self) -> TimeSlice:
        return self.place.time_slice

    def at(self, priority: Priority) -> Self:
        return replace(self, priority=priority)

    async def call(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        call = Call(self.hosted.number, work, args, kwargs)
        return cast("R", await self.place.call_in_child(self.priority, self.hosted, label, call))

    async def load(
        self, work: Callable[[T, W], object], weights: W, loaded: Callable[[], object] | None = None
    ) -> None:
        call = Call(self.hosted.number, work, (weights,))
        await self.place.load_in_child(self.priority, self.hosted, call, loaded)


def require_portable(instance: object, place: str) -> None:
    """Check that an instance can go to another machine.

    Raises:
        ModelError: it holds shared memory other than a :class:`~oppo.placement.mirrored.Gauge`, or cannot be pickled.
    """
    if not all(isinstance(block, Gauge) for block in pack_with_blocks(instance).blocks):
        raise ModelError(
            f"{kind_of(instance).__name__} holds weights, and memory is not shared between machines: {place!r} hosts "
            "what crosses as a recipe, such as a policy or a scorer that is given a ModelRecipe"
        )
