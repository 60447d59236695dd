"""Places on the machines of a cluster: a child is a Ray actor that answers orders."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar, cast, runtime_checkable

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from oppo import observe
from oppo.declared import require_whole
from oppo.errors import ModelError, one_line
from oppo.log import logger
from oppo.placement.place import Make
from oppo.placement.process import KILLED, Child, ChildProcess, Gone, Process, Setup, Start
from oppo.placement.ranks import RankedChild, listen
from oppo.placement.ray.cluster import ONE_CORE, Cluster, Room
from oppo.placement.ray.servant import GROUPS, Answered, Arrival, Copy, Gauges, Servant, versions
from oppo.placement.shared_memory import Gauge, Mirrored, Notice
from oppo.placement.wire import (
    Call,
    Callbacks,
    Create,
    Failure,
    Outcome,
    Packet,
    Request,
    pack,
    pack_with_blocks,
    pack_with_bulk,
    unpack,
)
from oppo.scheduling import DEFAULT_TIME_SLICE, TimeSlice

R = TypeVar("R")

PATIENCE: Final = 300.0
"""Seconds that an actor may wait for room on some machine; a cluster may have to start one."""

SILENCE: Final = 10.0
"""Seconds of waiting for room, or for a process to start, after which a message is logged."""

QUIET: Final = 1.0
"""Seconds after which an order that requests nothing is asked again: how old the gauges can be meanwhile."""

_NODE: Final = "ray.io/node-id"

_WHY: Final = re.compile(r"The actor (?:died|is dead) because (?P<why>[^.\n]+)")


@runtime_checkable
class MakesRemotely(Protocol):
    """What makes an instance from memory of this process, and knows how another machine makes one."""

    def remote(self) -> Make[object]:
        """Return what makes it where nothing is shared."""


class _MachineDied(Gone):
    """The machine of the child is dead."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ActorStart:
    """Starts a child (:data:`oppo.placement.process.Start`) as an actor.

    Attributes:
        strategy: where Ray puts it, one of its scheduling strategies.
        patience: seconds that it may wait for room.
    """

    cluster: Cluster
    room: Room = ONE_CORE
    strategy: object = "SPREAD"
    patience: float = PATIENCE

    def __call__(self, name: str, setup: Setup) -> RayChild:
        return RayChild(name, setup, self)

    def actor(self) -> ActorHandle[Any]:
        room = self.room
        remote: Any = ray.remote  # whose types leave the groups out
        servant = remote(concurrency_groups=GROUPS)(Servant).options(
            num_cpus=room.cpus,
            num_gpus=room.gpus,
            resources=dict(room.resources),
            scheduling_strategy=self.strategy,
            max_restarts=0,
            max_task_retries=0,
        )
        return cast("ActorHandle[Any]", servant.remote())


class RayChild(Child):
    """An actor; the constructor asks for it without waiting."""

    # Ray neither restarts it nor repeats a call: the supervisor of children does both.

    def __init__(self, name: str, setup: Setup, start: ActorStart) -> None:
        super().__init__()
        self._name = name
        self._how = start
        self._killed = False
        self._actor = start.actor()
        self._arrival: Arrival | None = None
        self._setup: Packet | None = None if setup is None else pack(Call(None, setup))
        self._numbers = itertools.count(1)
        self._gauges: dict[int, Gauge] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        return (0 if self._arrival is None else self._arrival.pid,)

    @property
    def address(self) -> str:
        return "" if self._arrival is None else self._arrival.address

    @property
    def whereabouts(self) -> str:
        return "not started yet" if self._arrival is None else f"pid {self._arrival.pid} on {self.address}"

    def orders(self, number: int, make: Make[object]) -> Sequence[Packet]:
        packet = pack_with_blocks(Create(number, make.remote() if isinstance(make, MakesRemotely) else make))
        if not all(isinstance(block, Gauge) for block in packet.blocks):
            raise ModelError(
                f"memory is not shared between machines, so {self._name!r} hosts no weights of this one: expected a "
                "policy or a scorer that is given a ModelRecipe, for example"
            )
        return [packet]

    def packed_load(self, call: Call) -> Packet:
        # The weights lie in the object store as long as the call is held.
        packet = pack_with_bulk(call)
        return packet._replace(bulk=[self._how.cluster.put(part) for part in packet.bulk])

    def ask(self, packet: Packet, callbacks: Callbacks | None = None) -> Outcome:
        if not all(isinstance(block, Mirrored) for block in packet.blocks):
            raise ModelError("memory is not shared between machines")
        self._await_arrival()
        if self._setup is not None:
            done = self._answer(self._setup)
            if isinstance(done, Failure):
                return done
            self._setup = None
        return self._converse(packet, callbacks) if callbacks else self._answer(packet)

    def end(self) -> None:
        self.kill()

    def kill(self) -> None:
        self._killed = True
        with suppress(RayError, RuntimeError, ValueError):  # it is dead, or the cluster is
            ray.kill(self._actor)

    def _await_arrival(self) -> None:
        if self._arrival is not None:
            return
        try:
            arrival = self._first_arrival(observe.now() + self._how.patience)
        except GetTimeoutError:
            self.kill()
            raise ModelError(
                f"no machine of the cluster had room for {self._name!r}, which takes {self._how.room}, in "
                f"{self._how.patience:g} s; free, in all: {self._how.cluster.free()}"
            ) from None
        here = versions()
        if arrival.versions != here:
            self.kill()
            raise ModelError(
                f"the machine {arrival.address} has {arrival.versions}, and this one {here}: install the same there"
            )
        self._arrival = arrival

    def _first_arrival(self, deadline: float) -> Arrival:
        # Ray may place an actor on a dead machine until it has noticed the death: then another is started.
        while True:
            coming: ray.ObjectRef[Arrival] = self._got(self._actor.arrive.remote)
            try:
                return self._in_time(coming, deadline)
            except _MachineDied:
                if self._killed or observe.now() > deadline:
                    raise
            self._actor = self._how.actor()
            if self._killed:  # meanwhile
                self.kill()

    def _in_time(self, coming: ray.ObjectRef[Arrival], deadline: float) -> Arrival:
        # A long wait is logged once.
        left = max(0.0, deadline - observe.now())
        if left > SILENCE:
            with suppress(GetTimeoutError):
                return self._got(lambda: ray.get(coming, timeout=SILENCE))
            how = self._how
            logger.info(
                f"{self._name!r} waits for room in the cluster: it takes {how.room}, and free are, in all, "
                f"{how.cluster.free()}; at most {how.patience:g} s"
            )
            left = max(0.0, deadline - observe.now())
        return self._got(lambda: ray.get(coming, timeout=left))

    def _answer(self, packet: Packet) -> Outcome:
        sent, copies = observe.now(), self._copies(packet)
        return self._awaited(self._got(lambda: self._actor.answer.remote(packet.data, copies, *packet.bulk)), sent)

    def _converse(self, packet: Packet, callbacks: Callbacks) -> Outcome:
        # An error of a callback takes the place of the answer.
        sent, number = observe.now(), next(self._numbers)
        with ExitStack() as watching:
            for notice in packet.blocks:
                if isinstance(notice, Notice):
                    watching.enter_context(notice.watched(partial(self._note, number, notice.number)))
            copies = self._copies(packet)
            answered: ray.ObjectRef[Answered]
            answered = self._got(lambda: self._actor.converse.remote(number, packet.data, copies, *packet.bulk))
            try:
                while self._requested(number, callbacks):
                    if ray.wait([answered], timeout=0)[0]:
                        self._requested(number, callbacks)  # those between the last look and the answer
                        break
                answer = self._awaited(answered, sent)
            except Gone:
                raise
            except BaseException:
                self.kill()  # or what it still waits for would keep every later order waiting
                raise
        return answer if callbacks.error is None else Failure(answer.start, answer.end, callbacks.error)

    def _requested(self, number: int, callbacks: Callbacks) -> bool:
        # Whether the order goes on, as far as is known: nothing is known of one that requests nothing for a while.
        fetching: ray.ObjectRef[tuple[Sequence[bytes], bool, Gauges]]
        over = False
        while not over:
            fetching = self._got(lambda: self._actor.requests.remote(number, QUIET))
            requests, over, gauges = self._got(partial(ray.get, fetching))
            self._read(gauges)
            for request in requests:
                reply = callbacks.run(cast("Request", unpack(Packet(request))))
                if reply is not None:
                    self._reply(number, reply.data)
            if not requests and not over:
                return True
        return False

    def _reply(self, number: int, data: bytes) -> None:
        sent: ray.ObjectRef[None] = self._got(lambda: self._actor.reply.remote(number, data))
        del sent  # nothing comes back, and a dead actor is found out by the next request

    def _note(self, number: int, notice: int, content: bytes) -> None:
        # Called by the writer.
        with suppress(RayError):  # the thread that waits for the answer finds out
            self._actor.note.remote(number, notice, content)

    def _copies(self, packet: Packet) -> list[Copy]:
        # Its gauges are read from now on.
        blocks = [block for block in packet.blocks if isinstance(block, Mirrored)]
        self._gauges |= {block.number: block for block in blocks if isinstance(block, Gauge)}
        return [Copy(block.number, block[:], gauge=isinstance(block, Gauge)) for block in blocks]

    def _read(self, gauges: Gauges) -> None:
        for number, content in gauges.items():
            self._gauges[number][:] = content

    def _awaited(self, answered: ray.ObjectRef[Answered], sent: float) -> Outcome:
        data, bulk, gauges = self._got(lambda: ray.get(answered))
        self._read(gauges)
        return on_this_clock(cast("Outcome", unpack(Packet(data, bulk=bulk))), sent, observe.now())

    def _got(self, get: Callable[[], R]) -> R:
        try:
            return get()
        except GetTimeoutError:
            raise
        except RayTaskError as error:
            raise self._unable(error) from error
        except RayError as error:
            if self._killed:
                raise Gone(KILLED) from None
            if isinstance(error, ActorDiedError) and error.actor_init_failed:
                raise self._unable(error) from error
            found = _WHY.search(str(error))
            if found is None:
                raise Gone(f"was lost ({one_line(error)})") from None
            kind = _MachineDied if "its node" in found["why"] else Gone
            raise kind(f"died, because {found['why']}") from None

    def _unable(self, error: RayError) -> ModelError:
        return ModelError(
            f"{self._name!r} cannot work on its machine, where oppo and what is called must be installed as here: "
            f"{str(error).strip().splitlines()[-1]}"
        )


def on_this_clock(outcome: Outcome, sent: float, received: float) -> Outcome:
    """Return an outcome of another machine with its times on this one's clock, of an order ``sent`` from here."""
    # As in the network time protocol, an order and its answer are taken to be equally long under way.
    ahead = (outcome.start + outcome.end - sent - received) / 2
    return replace(outcome, start=outcome.start - ahead, end=outcome.end - ahead)


class RayPlace(Process):
    """One actor, for one model or shared by several.

    As a :class:`~oppo.placement.Process`, but machines share no memory: the model of an instance is loaded where it
    lives, and later weights cross by Ray's object store.

    A dead actor, or one on a dead machine, is replaced on any machine with room for it: the instances are made again,
    get their last weights, and their rollouts are sent again. With ``restarts=0`` it is not, and calls with callbacks,
    as a policy makes, are possible: the thread that waits for the answer fetches the requests of the call, and runs
    them.

    Args:
        name, listener, time_slice: see :class:`~oppo.placement.Place`.
        cluster: must stay open as long as this place.
        room: of the actor on its machine.
        setup: called once in each actor before anything else; importable by name.
        strategy: where Ray puts an actor: one of its scheduling strategies.
        restarts: how many dead actors are replaced in an hour; above 0, calls with callbacks are refused.
        patience: seconds that an actor may wait for room on some machine.

    Raises:
        ModelError: ``setup`` cannot go to another process.

    Example:
        >>> with Cluster() as cluster, RayPlace("reward", cluster, room=Room(gpus=1)) as place:  # doctest: +SKIP
        ...     reward = hf.RewardModel(ModelRecipe(path="judge", kind="scalar", device="cuda"), place=place)
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
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
        patience: float = PATIENCE,
    ) -> None:
        start = ActorStart(cluster=cluster, room=room, strategy=strategy, patience=patience)
        super().__init__(name, listener=listener, setup=setup, restarts=restarts, time_slice=time_slice, start=start)


class RayRanks(Process):
    """A child process of this machine and actors of a cluster, the ranks, for an instance that shares its work out.

    As :class:`~oppo.placement.Ranks`. Rank 0 is a child of this process, with which it shares memory; Ray counts
    nothing of it. The other ranks are actors, for which Ray reserves room at once, or none; there an instance is made
    as :class:`MakesRemotely` says. All meet at a port of this machine, by ``torch.distributed``.

    A rank that dies, or whose machine does, ends the others: their shards are lost.

    Args:
        name, listener, time_slice: see :class:`~oppo.placement.Place`.
        cluster: must stay open as long as this place.
        count: of ranks, at least 2.
        room: of each rank but the first on its machine.
        spread: each on a machine of its own; otherwise all on as few as have room.
        setup: called once in each rank before anything else; importable by name.
        patience: seconds that the ranks may wait for room.

    Raises:
        ModelError: there was no room for them, or ``setup`` cannot go to another process.

    Example:
        >>> with Cluster() as cluster, RayRanks("trainer", cluster, 2, room=Room(gpus=1)) as ranks:  # doctest: +SKIP
        ...     recipe = ActorCriticRecipe(actor=ModelRecipe(path="actor", device="cuda"))
        ...     trainer = hf.HfTrainer(actor, sampling=sampling, place=ranks, recipe=recipe)
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
        require_whole("ranks", count, 2)
        bundles = _reserved(name, cluster, count, room, spread=spread, patience=patience)
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
        start = partial(RankedChild, starts, _PortMeeting(cluster, bundles))
        super().__init__(name, listener=listener, setup=setup, time_slice=time_slice, start=start)


class _PortMeeting:
    """Ranks of several machines meet at a port of rank 0's."""

    def __init__(self, cluster: Cluster, bundles: PlacementGroup) -> None:
        self._cluster = cluster
        self._bundles = bundles

    def of(self, number: int, first: Child) -> str:
        del number
        return cast("str", first.ask(pack(Call(None, listen, (self._cluster.driver_address(),)))).result("rank 0"))

    def close(self) -> None:
        remove_placement_group(self._bundles)


def _reserved(
    name: str,
    cluster: Cluster,
    count: int,
    room: Room,
    *,
    spread: bool,
    patience: float,
) -> PlacementGroup:
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
        logger.info(
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
