"""Calls in an actor on some machine of a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable

from oppo import observe
from oppo.placement.child import Setup
from oppo.placement.ray.child import PATIENCE, ActorStart
from oppo.placement.ray.cluster import ONE_CORE, Cluster, Room
from oppo.placement.remote import RemotePlace
from oppo.placement.supervised_process import SupervisedProcess
from oppo.placement.wire import Packet
from oppo.scheduling import DEFAULT_TIME_SLICE, TimeSlice


class RayPlace(RemotePlace):
    """One actor, owned by one model or shared by several that take turns there.

    It is used as a :class:`~oppo.placement.Process` is, but for what machines do not share. An instance crosses as a
    recipe (:class:`~oppo.placement.Recipe`), and its model is loaded where it lives. Weights that it is given later, as
    a critic or a policy is after each update, cross by Ray's object store.

    A dead actor, or one on a dead machine, is replaced on any machine with room for it: the instances are made again,
    get their last weights, and read their rollouts again. With ``restarts=0`` it is not, and calls with callbacks, as a
    policy makes, are possible: the thread that waits for the answer fetches what the call requests, and runs it.

    Args:
        name, listener, time_slice: see :class:`~oppo.placement.Place`.
        cluster: must stay open as long as this place.
        room: what the actor takes of its machine.
        setup: called once in each actor before anything else; importable by name.
        strategy: where Ray puts an actor: one of its scheduling strategies.
        restarts: how many dead actors are replaced in an hour; above 0, calls with callbacks are refused.
        tell: called with a sentence about each restart and about a long wait for room, from another thread.
        patience: seconds that an actor may wait for room on some machine.

    Raises:
        ModelError: ``setup`` cannot go to another process.

    Example:
        >>> with Cluster() as cluster, RayPlace("reward", cluster, room=Room(gpus=1)) as place:  # doctest: +SKIP
        ...     reward = hf.RewardModel(ModelRecipe(path="judge", kind="scalar", device="cuda"), thread=place)
    """

    what = "actor"

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        *,
        room: Room = ONE_CORE,
        listener: observe.SpanListener = observe.silent,
        setup: Setup = None,
        strategy: object = "SPREAD",
        restarts: int = 3,
        tell: Callable[[str], None] = observe.silent,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
        patience: float = PATIENCE,
    ) -> None:
        start = ActorStart(cluster=cluster, room=room, strategy=strategy, patience=patience, tell=tell)
        child = SupervisedProcess(name, setup=setup, restarts=restarts, tell=tell, start=start)
        super().__init__(name, child, listener=listener, time_slice=time_slice)
        self._cluster = cluster

    def stored(self, packet: Packet) -> Packet:
        """Return ``packet`` with its bulk in the object store, as long as the packet is held."""
        return packet._replace(bulk=[self._cluster.put(part) for part in packet.bulk])
