"""Places on the machines of a Ray cluster. Ray starts processes and finds room for them; nothing else is asked of it.

::

    RayPlace    one actor               scorers, whose models are given by recipes; replaced if it dies, also by one on
                                        another machine; or the policy, with restarts=0, as rollouts are lost with it
    RayRanks    an actor for each rank  a trainer, given by a recipe; each rank in a bundle of one placement group

Orders, their callbacks, answers and the weights of a sync travel by Ray; tensors between ranks travel by
``torch.distributed``. No code is sent: oppo, and the modules that calls name, must be installed on each machine, in
one version.

In a call that calls back, requests wait until the driver fetches them, and replies until the work reads them::

    work      --request-->  Conversation  <--fetch, which waits--   driver      in threads of their own
    work      <---reply---  Conversation  <--------reply---------   driver
"""


# ruff: noqa: E402 - the imports below need Ray

from __future__ import annotations

from oppo.libraries import require

require("ray", "a place on other machines")

import itertools
import logging
import os
import platform
import re
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar, cast

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.actor import ActorHandle
from ray.exceptions import ActorDiedError, GetTimeoutError, RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from oppo import observe
from oppo.declared import require_whole
from oppo.errors import ConfigError, ModelError, ModelLost, one_line
from oppo.log import logger
from oppo.placement.child import (
    Call,
    Callbacks,
    Caller,
    Outcome,
    Packet,
    Request,
    answer,
    pack,
    pack_with_blocks,
    pack_with_bulk,
    unpack,
)
from oppo.placement.place import Closing, Make
from oppo.placement.process import KILLED, Child, ChildProcess, Gone, Process, Setup, Start
from oppo.placement.ranks import RankedChild, listen
from oppo.placement.shared_memory import Block, Gauge, Mirrored, Notice

__all__ = ["Cluster", "RayPlace", "RayRanks", "Room"]

R = TypeVar("R")

REACH: Final = 10.0
"""Seconds in which a cluster's head must accept a connection; Ray itself tries for a quarter of an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """The resources of its machine that an actor takes, as Ray counts them.

    Attributes:
        cpus: cores; what computes there does so in as many threads, unless the setup says otherwise.
        gpus: CUDA devices, the only ones that the actor sees; a fraction shares one.
    """

    cpus: int = 1
    gpus: float = 0.0

    def bundle(self) -> dict[str, float]:
        return {"CPU": float(self.cpus), **({"GPU": self.gpus} if self.gpus else {})}

    def __str__(self) -> str:
        return listed(self.bundle())


ONE_CORE: Final = Room()


class Cluster(Closing):
    """A connection to a running Ray cluster.

    A process has one at most: an existing connection is used, and left open. Ray's handlers of signals are not
    installed. When this process ends, however it does, Ray ends the actors that it has started.

    Args:
        address: ``host:port`` of the head, or ``auto``: ``RAY_ADDRESS``, or the cluster that was started on
            this machine with ``ray start``.

    Raises:
        ConfigError: there is no such cluster, or it runs another version of Ray or Python.

    Example:
        >>> with Cluster("auto") as cluster, RayPlace("critic", cluster) as place:  # doctest: +SKIP
        ...     critic = hf.ValueModel(ModelRecipe(path="critic", kind="scalar"), place=place)
    """

    def __init__(self, address: str = "auto") -> None:
        self.address = address
        self._ours = not ray.is_initialized()
        if self._ours:
            found = _reached(address)
            try:
                with _handlers_kept():
                    ray.init(found, log_to_driver=False, logging_level=logging.WARNING)
            except (ConnectionError, RuntimeError, ValueError) as error:
                raise ConfigError(f"the Ray cluster at {found} cannot be used: {one_line(error)}") from error

    def put(self, value: object) -> ray.ObjectRef[object]:
        """Return a reference to ``value``, which lies in the object store while the reference is held."""
        try:
            return ray.put(value)
        except RayError as error:
            raise ModelLost(f"the object store of this machine cannot take it: {one_line(error)}") from error

    def free(self) -> str:
        found = ray.available_resources().items()
        return listed({name: amount for name, amount in found if ":" not in name and "_group_" not in name})

    def close(self) -> None:
        """End the connection, unless it was there before, and with it the actors; idempotent."""
        ours, self._ours = self._ours, False
        if ours:
            ray.shutdown()


def _reached(address: str) -> str:
    if "://" in address:
        raise ConfigError(
            f"expected the host:port of a cluster's head, or 'auto', got {address!r}: leave out the scheme, and run on "
            "a machine of the cluster, since Ray's client is not supported"
        )
    try:
        found = canonicalize_bootstrap_address_or_die(address)
        host, _, port = found.rpartition(":")
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH).close()
    except (ConnectionError, OSError, ValueError) as error:
        raise ConfigError(
            f"there is no Ray cluster at {address!r} ({one_line(error)}): start one with `ray start --head`, and give "
            "the address that it shows"
        ) from error
    return found


@contextmanager
def _handlers_kept() -> Iterator[None]:
    on_main_thread = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM) if on_main_thread}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listed(amounts: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(amounts.items())) or "nothing"


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where an actor has started; ``versions``: of the packages that must be equal there and here."""

    pid: int
    address: str
    versions: dict[str, str]


def versions() -> dict[str, str]:
    return {"Python": platform.python_version(), **{name: version(name) for name in ("oppo", "numpy")}}


class Copy(NamedTuple):
    """A block with one writer, for a machine that does not share its memory; ``gauge``: the writer is here."""

    number: int
    content: bytes
    gauge: bool


Gauges: TypeAlias = Mapping[int, bytes]  # the bytes of gauges, by number

Answered: TypeAlias = tuple[bytes, Sequence[object], Gauges]
"""An answer, pickled, its large things, and the gauges."""

LINGER: Final = 0.005
"""Seconds that a request which nothing waits for may wait for others: fetching each alone would slow the work down."""


class Conversation(Caller):
    """The requests of one call, and the replies and notices for it."""

    def __init__(self) -> None:
        super().__init__()
        self._news = threading.Condition()
        self._requests: list[bytes] = []
        self._replies: deque[bytes] = deque()
        self._notices: dict[int, bytearray] = {}
        self._over = False
        self._waits = False

    def send(self, request: Packet) -> None:
        with self._news:
            self._requests.append(request.data)
            if len(self._requests) == 1:  # others are fetched with it
                self._news.notify_all()

    def receive(self) -> Packet:
        with self._news:
            self._waits = True
            self._news.notify_all()
            self._news.wait_for(lambda: self._replies)
            self._waits = False
            return Packet(self._replies.popleft())

    def has_come(self) -> bool:
        return bool(self._replies)

    def end(self) -> None:
        with self._news:
            self._over = True
            self._news.notify_all()

    def fetch(self, patience: float) -> tuple[list[bytes], bool]:
        """Return new requests, and whether there will be no more; wait ``patience`` seconds for either."""
        with self._news:
            self._news.wait_for(lambda: self._requests or self._over, patience)
            if self._requests:
                self._news.wait_for(lambda: self._waits or self._over, LINGER)
            fetched, self._requests = self._requests, []
            return fetched, self._over

    def reply(self, data: bytes) -> None:
        with self._news:
            self._replies.append(data)
            self._news.notify_all()

    def notice(self, number: int, content: bytes) -> bytearray:
        """Return the copy of a notice; unless a write has come before, with this content."""
        with self._news:
            return self._notices.setdefault(number, bytearray(content))

    def note(self, number: int, content: bytes) -> None:
        with self._news:
            self._notices.setdefault(number, bytearray(content))[:] = content


class Servant:
    """Answers orders in one thread, one at a time; messages of an order in progress use other threads."""

    def __init__(self) -> None:
        self._instances: dict[int, object] = {}
        self._turn = threading.Lock()
        self._gauges: dict[int, bytearray] = {}
        self._number = 0
        self._conversation = Conversation()

    def arrive(self) -> Arrival:
        return Arrival(os.getpid(), ray.util.get_node_ip_address(), versions())

    def answer(self, number: int, data: bytes, copies: Sequence[Copy], *bulk: object) -> Answered:
        conversation = self._of(number)
        try:
            packet = Packet(data, self._blocks(copies, conversation) or bulk)
            answered = answer(packet, self._instances, conversation, seal=pack_with_bulk)
        finally:
            conversation.end()
        if answered is None:
            raise AssertionError("a reply came as an order")
        return answered.data, answered.parts, self._read()

    @ray.method(concurrency_group="listen")
    def requests(self, number: int, patience: float) -> tuple[Sequence[bytes], bool, Gauges]:
        fetched, over = self._of(number).fetch(patience)
        return fetched, over, self._read()

    @ray.method(concurrency_group="talk")
    def reply(self, number: int, data: bytes) -> None:
        self._of(number).reply(data)

    @ray.method(concurrency_group="talk")
    def note(self, number: int, notice: int, content: bytes) -> None:
        self._of(number).note(notice, content)

    def _of(self, number: int) -> Conversation:
        # A late answer belongs to a conversation that was closed.
        with self._turn:
            if number > self._number:
                self._number, self._conversation = number, Conversation()
            return self._conversation if number == self._number else Conversation()

    def _blocks(self, copies: Sequence[Copy], conversation: Conversation) -> list[bytearray]:
        return [
            self._gauges.setdefault(copy.number, bytearray(copy.content))
            if copy.gauge
            else conversation.notice(copy.number, copy.content)
            for copy in copies
        ]

    def _read(self) -> Gauges:
        return {number: bytes(gauge) for number, gauge in self._gauges.copy().items()}


GROUPS: Final = {"listen": 1, "talk": 1}
"""The threads of an actor beside the one that answers orders; each does its work in order."""


PATIENCE: Final = 300.0
"""Seconds that an actor may wait for room on some machine; a cluster may have to start one."""

SILENCE: Final = 10.0  # seconds of waiting for room, or for a process to start, after which a message is logged

QUIET: Final = 1.0
"""Seconds after which an order that requests nothing is asked again: how old the gauges can be meanwhile."""

_NODE: Final = "ray.io/node-id"

_WHY: Final = re.compile(r"The actor (?:died|is dead) because (?P<why>[^.\n]+)")


class _MachineDied(Gone):
    """The machine of the child is dead."""


class RayChild(Child):
    """An actor; the constructor asks for it without waiting.

    Args:
        strategy: where Ray puts it, one of its scheduling strategies.
        patience: seconds that it may wait for room.
    """

    # Ray neither restarts it nor repeats a call: the supervisor of children does both.

    def __init__(
        self, name: str, setup: Setup, *, cluster: Cluster, room: Room, strategy: object, patience: float
    ) -> None:
        super().__init__()
        self._cluster, self._room, self._strategy, self._patience = cluster, room, strategy, patience
        self._name = name
        self._killed = False
        self._setup: Packet | None = None if setup is None else pack(Call(None, setup))
        self._actor = self._started()
        self._arrival: Arrival | None = None
        self._numbers = itertools.count(1)
        self._gauges: dict[int, Gauge] = {}

    def _started(self) -> ActorHandle[Any]:
        remote: Any = ray.remote  # whose types leave the groups out
        servant = remote(concurrency_groups=GROUPS)(Servant).options(
            num_cpus=self._room.cpus,
            num_gpus=self._room.gpus,
            scheduling_strategy=self._strategy,
            max_restarts=0,
            max_task_retries=0,
        )
        return cast("ActorHandle[Any]", servant.remote())

    @property
    def pids(self) -> tuple[int, ...]:
        return (0 if self._arrival is None else self._arrival.pid,)

    @property
    def whereabouts(self) -> str:
        return "not started yet" if self._arrival is None else f"pid {self._arrival.pid} on {self._arrival.address}"

    def orders(self, number: int, make: Make[object]) -> Sequence[Packet]:
        # What makes an instance from memory of this process has a method that says how another machine makes one.
        remote: Callable[[], Make[object]] | None = getattr(make, "remote", None)
        packet = pack_with_blocks(Call(None, make if remote is None else remote(), makes=number))
        if not all(isinstance(block, Gauge) for block in packet.parts):
            raise ModelError(
                f"memory is not shared between machines, so {self._name!r} hosts no weights of this one: expected a "
                "policy or a scorer that is given a ModelRecipe, for example"
            )
        return [packet]

    def packed_load(self, call: Call) -> Packet:
        # The weights lie in the object store as long as the call is held.
        packet = pack_with_bulk(call)
        return packet._replace(parts=[self._cluster.put(part) for part in packet.parts])

    def ask(self, packet: Packet, callbacks: Callbacks | None = None) -> Outcome:
        if any(isinstance(part, Block) and not isinstance(part, Mirrored) for part in packet.parts):
            raise ModelError("memory is not shared between machines")
        self._await_arrival()
        if self._setup is not None:
            done = self._exchange(self._setup, Callbacks())
            if done.error is not None:
                return done
            self._setup = None
        return self._exchange(packet, callbacks or Callbacks())

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
            arrival = self._first_arrival(observe.now() + self._patience)
        except GetTimeoutError:
            self.kill()
            raise ModelError(
                f"no machine of the cluster had room for {self._name!r}, which takes {self._room}, in "
                f"{self._patience:g} s; free, in all: {self._cluster.free()}"
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
            self._actor = self._started()
            if self._killed:  # meanwhile
                self.kill()

    def _in_time(self, coming: ray.ObjectRef[Arrival], deadline: float) -> Arrival:
        # A long wait is logged once.
        left = max(0.0, deadline - observe.now())
        if left > SILENCE:
            with suppress(GetTimeoutError):
                return self._got(lambda: ray.get(coming, timeout=SILENCE))
            logger.info(
                f"{self._name!r} waits for room in the cluster: it takes {self._room}, and free are, in all, "
                f"{self._cluster.free()}; at most {self._patience:g} s"
            )
            left = max(0.0, deadline - observe.now())
        return self._got(lambda: ray.get(coming, timeout=left))

    def _exchange(self, packet: Packet, callbacks: Callbacks) -> Outcome:
        sent, number = observe.now(), next(self._numbers)
        with ExitStack() as watching:
            for notice in packet.parts:
                if isinstance(notice, Notice):
                    watching.enter_context(notice.watched(partial(self._note, number, notice.number)))
            copies = self._copies(packet)
            bulk = () if copies else packet.parts
            answered: ray.ObjectRef[Answered]
            answered = self._got(lambda: self._actor.answer.remote(number, packet.data, copies, *bulk))
            try:
                while callbacks and self._requested(number, callbacks):
                    if ray.wait([answered], timeout=0)[0]:
                        self._requested(number, callbacks)  # those between the last look and the answer
                        break
                outcome = self._awaited(answered, sent)
            except Gone:
                raise
            except BaseException:
                if callbacks:
                    self.kill()  # or its pending wait would block every later order
                raise
        return callbacks.over(outcome)

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
        blocks = [part for part in packet.parts if isinstance(part, Mirrored)]
        self._gauges |= {block.number: block for block in blocks if isinstance(block, Gauge)}
        return [Copy(block.number, block[:], gauge=isinstance(block, Gauge)) for block in blocks]

    def _read(self, gauges: Gauges) -> None:
        for number, content in gauges.items():
            self._gauges[number][:] = content

    def _awaited(self, answered: ray.ObjectRef[Answered], sent: float) -> Outcome:
        data, bulk, gauges = self._got(lambda: ray.get(answered))
        self._read(gauges)
        return on_this_clock(cast("Outcome", unpack(Packet(data, bulk))), sent, observe.now())

    def _got(self, get: Callable[[], R]) -> R:
        try:
            return get()
        except GetTimeoutError:
            raise
        except RayTaskError as error:
            raise self._unable(error) from error
        except RayError as error:
            if isinstance(error, ActorDiedError) and error.actor_init_failed:
                raise self._unable(error) from error
            found = _WHY.search(str(error))
            if self._killed and (found is None or "ray.kill" in str(error)):  # or it was dead before
                raise Gone(KILLED) from None
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
        name: see :class:`~oppo.placement.Place`.
        cluster: must stay open as long as this place.
        room: of the actor on its machine.
        setup: called once in each actor before anything else; importable by name.
        strategy: where Ray puts an actor: one of its scheduling strategies.
        restarts: how many dead actors are replaced in an hour; above 0, calls with callbacks are refused.
        patience: seconds that an actor may wait for room on some machine.

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
        setup: Setup = None,
        strategy: object = "SPREAD",
        restarts: int = 3,
        patience: float = PATIENCE,
    ) -> None:
        start = partial(RayChild, cluster=cluster, room=room, strategy=strategy, patience=patience)
        super().__init__(name, setup=setup, restarts=restarts, start=start)


class RayRanks(Process):
    """A child process of this machine and actors of a cluster, the ranks, for an instance that shares its work out.

    As :class:`~oppo.placement.Ranks`. Rank 0 is a child of this process, with which it shares memory; Ray counts
    nothing of it. The other ranks are actors, for which Ray reserves room at once, or none; what
    makes an instance there is ``make.remote()``. All meet at a port of this machine, by ``torch.distributed``.

    A rank that dies, or whose machine does, ends the others: their shards are lost.

    Args:
        name: see :class:`~oppo.placement.Place`.
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
        setup: Setup = None,
        patience: float = PATIENCE,
    ) -> None:
        require_whole("ranks", count, 2)
        bundles = _reserved(name, cluster, count, room, spread=spread, patience=patience)
        starts: list[Start] = [ChildProcess]
        for rank in range(count - 1):
            strategy = PlacementGroupSchedulingStrategy(bundles, placement_group_bundle_index=rank)
            starts.append(partial(RayChild, cluster=cluster, room=room, strategy=strategy, patience=patience))
        start = partial(RankedChild, starts, _port, partial(remove_placement_group, bundles))
        super().__init__(name, setup=setup, start=start)


def _port(number: int, first: Child) -> str:
    # Ranks of several machines meet at a port of rank 0's.
    del number
    order = Call(None, listen, (str(ray.util.get_node_ip_address()),))
    return cast("str", first.ask(pack(order)).result("rank 0"))


def _reserved(name: str, cluster: Cluster, count: int, room: Room, *, spread: bool, patience: float) -> PlacementGroup:
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
