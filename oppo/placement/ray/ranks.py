"""Calls that several machines make together, each on its own copy of the instance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, TypeVar, cast

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from oppo import observe
from oppo.declared import require_whole
from oppo.errors import ModelError
from oppo.placement.child import Child, Setup, Start
from oppo.placement.child_process import ChildProcess
from oppo.placement.place import Hosted, Journal
from oppo.placement.rank_group import RankGroup, listen
from oppo.placement.ranked_place import RankedPlace, RanksInstance
from oppo.placement.ray.child import PATIENCE, SILENCE, ActorStart
from oppo.placement.ray.cluster import ONE_CORE, Cluster, Room
from oppo.placement.recipe import HasRecipe, Recipe, made
from oppo.placement.remote import require_portable
from oppo.placement.wire import Call, pack
from oppo.scheduling import DEFAULT_TIME_SLICE, TimeSlice

T = TypeVar("T")

_NODE: Final = "ray.io/node-id"


class RayRanks(RankedPlace):
    """A child process of this machine and actors of a cluster, the ranks, for an instance that shares its work out.

    It is used as :class:`~oppo.placement.Ranks` are. Rank 0 is a child of this process, with which it shares memory:
    weights that it gathers need not be sent, and files that it writes are found here. Ray counts nothing of what it
    takes. The other ranks are actors, for which Ray reserves room at once, or none. To them an instance crosses as its
    recipe (:class:`~oppo.placement.recipe.HasRecipe`). All meet at a port of this machine, by ``torch.distributed``.

    A rank that dies, or whose machine does, ends the others: what they held in shards is lost.

    Args:
        name, listener, time_slice: see :class:`~oppo.placement.Place`.
        cluster: must stay open as long as this place.
        count: of ranks, at least 2.
        room: what each rank but the first takes of its machine.
        spread: each on a machine of its own; otherwise all on as few as have room.
        setup: called once in each rank before anything else; importable by name.
        tell: called with a sentence about a long wait for room.
        patience: seconds that the ranks may wait for it.

    Raises:
        ModelError: there was no room for them, or ``setup`` cannot go to another process.

    Example:
        >>> with Cluster() as cluster, RayRanks("trainer", cluster, 2, room=Room(gpus=1)) as ranks:  # doctest: +SKIP
        ...     recipe = ActorCriticRecipe(actor=ModelRecipe(path="actor", device="cuda"))
        ...     trainer = hf.HfTrainer(actor, sampling=sampling, thread=ranks, recipe=recipe)
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
        tell: Callable[[str], None] = observe.silent,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
        patience: float = PATIENCE,
    ) -> None:
        require_whole("ranks", count, 2)
        bundles = _reserved(name, cluster, count, room, spread=spread, patience=patience, tell=tell)
        starts: list[Start] = [ChildProcess]
        starts += [
            ActorStart(
                cluster=cluster,
                room=room,
                strategy=PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank - 1),
                patience=patience,
            )
            for rank in range(1, count)
        ]
        group = RankGroup(name, starts, setup, _PortMeeting(cluster, bundles))
        super().__init__(name, group, listener=listener, time_slice=time_slice)

    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Host a copy of ``instance`` in every rank; nothing is restarted, so ``journal`` records nothing.

        Raises:
            ModelError: it is no :class:`~oppo.placement.Member`; or it has no recipe, and holds memory of this process
                or cannot be pickled.
        """
        del journal
        here = made(instance)
        if isinstance(instance, Recipe):
            elsewhere: object = instance
        else:
            elsewhere = here.recipe() if isinstance(here, HasRecipe) else here
        require_portable(elsewhere, self.name)
        return RanksInstance(here, track or self.name, place=self, number=self._children.host(here, elsewhere))


class _PortMeeting:
    """Ranks of several machines meet at a port of rank 0's; implements :class:`oppo.placement.rank_group.Meeting`."""

    def __init__(self, cluster: Cluster, bundles: PlacementGroup) -> None:
        self._cluster = cluster
        self._bundles = bundles

    def of(self, number: int, first: Child) -> str:
        """Return a port of the driver's address in the cluster, at which rank 0 listens from now on."""
        del number
        return cast("str", first.ask(pack(Call(None, listen, (self._cluster.driver_address(),)))).result("rank 0"))

    def close(self) -> None:
        """Give the room back."""
        remove_placement_group(self._bundles)


def _reserved(
    name: str,
    cluster: Cluster,
    count: int,
    room: Room,
    *,
    spread: bool,
    patience: float,
    tell: Callable[[str], None],
) -> PlacementGroup:
    """Return room for all ranks but the first."""
    apart = {_NODE: f"!{ray.get_runtime_context().get_node_id()}"} if spread else {}
    reserved: PlacementGroup = placement_group(
        [room.bundle()] * (count - 1),
        "STRICT_SPREAD" if spread else "PACK",
        bundle_label_selector=[apart] * (count - 1),
    )
    where = "each on another machine" if spread else "on any machines"
    begun = min(SILENCE, patience)
    there = reserved.wait(begun)
    if not there and patience > begun:
        tell(
            f"the ranks of {name!r} wait for room in the cluster, {where}: each of {count - 1} takes {room}, and free "
            f"are, in all, {cluster.free()}; at most {patience:g} s"
        )
        there = reserved.wait(patience - begun)
    if not there:
        remove_placement_group(reserved)
        raise ModelError(
            f"the cluster had no room for the ranks of {name!r} beside the first, {where}, in {patience:g} s: each of "
            f"{count - 1} takes {room}, and free are, in all, {cluster.free()}"
        )
    return reserved
