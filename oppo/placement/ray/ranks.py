"""Calls that several actors make together, each on its own copy of the instance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from oppo import observe
from oppo.errors import ModelError
from oppo.numeric import require_whole
from oppo.placement.child import Child, Setup
from oppo.placement.place import Hosted, Journal
from oppo.placement.rank_group import RankGroup
from oppo.placement.ranked_place import RankedPlace
from oppo.placement.ray.child import PATIENCE, ActorStart, RayChild
from oppo.placement.ray.cluster import ONE_CORE, Cluster, Room
from oppo.placement.ray.servant import free_port
from oppo.placement.recipe import Recipe
from oppo.placement.remote import require_portable
from oppo.placement.wire import Call, pack
from oppo.scheduling import DEFAULT_TIME_SLICE, IN_ORDER, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")
W = TypeVar("W")


class RayRanks(RankedPlace):
    """Several actors, the ranks, for an instance that shares its work out among its copies.

    It is used as :class:`~oppo.placement.Ranks` are; the instance crosses as a recipe. Ray reserves room for all ranks
    at once, or for none. Rank 0 is on the driver's machine, so that files that it writes, checkpoints for example, are
    found there. The ranks meet at a port of that machine, by ``torch.distributed``.

    A rank that dies, or whose machine does, ends the others: what they held in shards is lost.

    Args:
        name, listener, time_slice: see :class:`~oppo.placement.Place`.
        cluster: must stay open as long as this place.
        count: of ranks, at least 1.
        room: what each takes of its machine.
        spread: on as many machines as there are ranks, or on as few as have room.
        setup: called once in each rank before anything else; importable by name.
        patience: seconds that the ranks may wait for room.

    Raises:
        ModelError: there was no room for them, or ``setup`` cannot go to another process.
    """

    what = "group of ranks"

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        count: int,
        *,
        room: Room = ONE_CORE,
        spread: bool = False,
        listener: observe.SpanListener = observe.silent,
        setup: Setup = None,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
        patience: float = PATIENCE,
    ) -> None:
        require_whole("ranks", count, 1)
        bundles = _reserved(name, cluster, count, room, spread=spread, patience=patience)
        starts = [
            ActorStart(
                cluster=cluster,
                room=room,
                strategy=PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank),
                patience=patience,
            )
            for rank in range(count)
        ]
        super().__init__(
            name, RankGroup(name, starts, setup, _PortMeeting(bundles)), listener=listener, time_slice=time_slice
        )

    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Host a copy of ``instance`` in every rank; nothing is restarted, so ``journal`` records nothing.

        Raises:
            ModelError: it is no :class:`~oppo.placement.Member`, holds memory of this process, or cannot be pickled.
        """
        del journal
        require_portable(instance, self.name)
        return _RemoteRanksInstance(self, track or self.name, self._group.host(instance))


class _PortMeeting:
    """Ranks of several machines meet at a port of rank 0's; implements :class:`oppo.placement.rank_group.Meeting`."""

    def __init__(self, bundles: PlacementGroup) -> None:
        self._bundles = bundles

    def of(self, number: int, first: Child) -> str:
        """Return a port that nothing listens on yet."""
        del number
        port = first.ask(pack(Call(None, free_port))).result("rank 0")
        return f"tcp://{cast('RayChild', first).address}:{port}"

    def close(self) -> None:
        """Give the room back."""
        remove_placement_group(self._bundles)


@dataclass(frozen=True, slots=True, eq=False)
class _RemoteRanksInstance(Generic[T]):
    place: RayRanks
    track: str
    number: int
    priority: Priority = IN_ORDER

    @property
    def time_slice(self) -> TimeSlice:
        return self.place.time_slice

    def at(self, priority: Priority) -> Self:
        return replace(self, priority=priority)

    async def call(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        call = Call(self.number, work, args, kwargs)
        return cast("R", await self.place.call_in_ranks(self.priority, self.track, label, call))

    async def load(
        self, work: Callable[[T, W], object], weights: W, loaded: Callable[[], object] | None = None
    ) -> None:
        call = Call(self.number, work, (weights,))
        await self.place.call_in_ranks(self.priority, self.track, "load", call, loaded)


def _reserved(name: str, cluster: Cluster, count: int, room: Room, *, spread: bool, patience: float) -> PlacementGroup:
    """Return room for all ranks, the first of it on the driver's machine."""
    bundles = [room.bundle() for _ in range(count)]
    bundles[0] = {**bundles[0], f"node:{cluster.driver_address()}": 0.001}
    reserved: PlacementGroup = placement_group(bundles, "STRICT_SPREAD" if spread else "PACK")
    if not reserved.wait(patience):
        remove_placement_group(reserved)
        where = "each on a machine of its own" if spread else "on any machines"
        raise ModelError(
            f"the cluster had no room for the {count} ranks of {name!r}, {where} and the first on this one, in "
            f"{patience:g} s; each takes {room}, and free are, in all, {cluster.free()}"
        )
    return reserved
