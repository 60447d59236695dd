"""Calls in a child process, which has an interpreter, and so an interpreter lock, of its own.

::

    Process  ──make an instance, call it──>  Child   a process of this machine (ChildProcess) or of another
       │                                             (oppo.placement.ray), or several of them (oppo.placement.ranks)
       └── replaces a child that died, up to ``restarts`` times an hour
"""

from __future__ import annotations

import math
import signal
import socket
import subprocess
import sys
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from multiprocessing.connection import Connection, Pipe
from typing import Any, ClassVar, Concatenate, Final, Generic, ParamSpec, TypeAlias, TypeVar, cast

import anyio

from oppo import observe
from oppo.declared import require_whole
from oppo.errors import ModelError, ModelLost, ProtocolError, SessionsLost
from oppo.log import logger
from oppo.placement.child import (
    Bulk,
    Call,
    Callbacks,
    Outcome,
    Packet,
    Request,
    heed_interrupts,
    pack,
    pack_with_blocks,
    receive,
    send,
    unpack,
)
from oppo.placement.place import Hosted, Loaded, Make, Place, Thread, in_thread, maker, result_of
from oppo.placement.shared_memory import Gauge
from oppo.scheduling import Priority

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")

RESTART_WINDOW = 3600.0
"""Seconds over which restarts are counted: several deaths in an hour are a lasting fault, one in a day an accident."""

Setup: TypeAlias = Callable[[], object] | None  # a function that a child calls once, before anything else


class Gone(Exception):  # noqa: N818 - it says what happened; caught in this package, never seen outside
    """The child is dead; ``how``, as in ``was killed by SIGKILL``; ``sequel``: the consequences for other processes."""

    def __init__(self, how: str, *, who: str = "", sequel: str = "") -> None:
        super().__init__(how)
        self.who = who
        self.sequel = sequel


class Child(ABC):
    """One process, or several that do the same, of this machine or another: it makes instances and executes orders."""

    def __init__(self) -> None:
        self.created: set[int] = set()

    @property
    @abstractmethod
    def pids(self) -> tuple[int, ...]:
        """The numbers of the processes, on their machines."""

    @property
    def whereabouts(self) -> str:
        return f"pid {self.pids[0]}"

    def orders(self, number: int, make: Make[object]) -> Sequence[Packet]:
        """The order to make an instance, for each process; any child of this kind executes it."""
        return [pack_with_blocks(Call(None, make, makes=number))]

    def create(self, number: int, orders: Sequence[Packet]) -> Outcome:
        del number
        (order,) = orders
        return self.ask(order)

    def packed_load(self, call: Call) -> Packet:
        """A call with weights; this child, or another of its kind, may be sent it several times."""
        return pack(call)

    @abstractmethod
    def ask(self, packet: Packet, callbacks: Callbacks | None = None) -> Outcome:
        """Send an order and return its answer, to the first a failed setup; run its callbacks here, in this thread."""

    @abstractmethod
    def end(self) -> None:
        """Let the child exit, which has no order in progress; idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the child, whatever it is doing; a thread that waits for an answer gets :class:`Gone`."""


Start: TypeAlias = Callable[[str, Setup], Child]
"""Starts a child of this name, without waiting for it, with its setup."""

_PROGRAM: Final = (
    "import sys; name, fd, lifeline, *sys.path = sys.argv[1:]; "
    "from oppo.placement.child import serve; serve(int(fd), int(lifeline))"
)
"""The child runs this program, not the parent's: no script or notebook of a user runs twice."""

KILLED: Final = "was killed by this process"
"""The death of a child that its owner has killed, whatever status the system reports."""

_GRACE: Final = 5.0  # seconds until a child whose socket is closed at either end is killed

INTERRUPTED: Final = 2.0  # seconds in which a call of a child that has been interrupted must end


class ChildProcess(Child):
    """A process of this machine that searches for modules where this one does, ignores Ctrl-C and dies with it.

    The constructor starts the process without waiting for it; its first orders run while the parent goes on.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        super().__init__()
        first = [] if setup is None else [pack_with_blocks(Call(None, setup))]
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = Pipe(duplex=False)
        with theirs, lifeline, _interrupts_blocked():
            # The program is this package's own; the interpreter is the one that runs.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", _PROGRAM, name, *map(str, (theirs.fileno(), lifeline.fileno(), *sys.path))],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline.fileno()),
            )
        self._connection: Connection[bytes, bytes] = Connection(ours.detach())
        self._unanswered = 0
        self._killed = False
        with suppress(Gone):  # the first order raises it again
            for packet in first:
                self._send(packet)
                self._unanswered += 1

    @property
    def pids(self) -> tuple[int, ...]:
        return (self._process.pid,)

    def ask(self, packet: Packet, callbacks: Callbacks | None = None) -> Outcome:
        while self._unanswered:
            outcome = self._answer(Callbacks())
            self._unanswered -= 1
            if outcome.error is not None:
                return outcome
        self._send(packet)
        return self._answer(callbacks or Callbacks())

    def _answer(self, callbacks: Callbacks) -> Outcome:
        while isinstance(message := self._receive(), Request):
            if (reply := callbacks.run(message)) is not None:
                self._send(reply)
        return callbacks.over(cast("Outcome", message))

    def end(self) -> None:
        self._connection.close()
        self._lifeline.close()
        self._reap()

    def kill(self) -> None:
        self._killed |= self._process.poll() is None
        self._process.kill()
        self._process.wait()

    def interrupt(self) -> None:
        self._process.send_signal(signal.SIGUSR1)

    def _send(self, packet: Packet) -> None:
        try:
            send(self._connection, packet)
        except OSError:
            raise Gone(self._death()) from None

    def _receive(self) -> object:
        try:
            packet = receive(self._connection)
        except (EOFError, OSError):
            raise Gone(self._death()) from None
        return unpack(packet)

    def _reap(self) -> int:
        try:
            return self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self.kill()
            return self._process.wait()

    def _death(self) -> str:
        code = self._reap()
        if self._killed:
            return KILLED
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (as the system does when memory runs out)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    # A child started meanwhile inherits the block, and ignores Ctrl-C from its first moment.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Process(Place):
    """One child process, for one model or shared by several.

    An instance is made in the child at its first call; its :mod:`oppo.placement.shared_memory` is shared. Its methods
    are called in one thread, in the order of their priorities (:mod:`oppo.scheduling`). Spans are timed by the child,
    on the clock that both processes share. Errors come back as themselves. The child writes to the parent's output,
    ignores Ctrl-C and dies with its parent.

    If the child dies, the call in progress and every later one raise :class:`~oppo.errors.ModelLost`. With ``restarts``
    another child is started instead, in which the instances are made anew and get their last weights. The next call of
    an instance that was called before raises :class:`~oppo.errors.SessionsLost`. Shared memory survives.

    Args:
        name: see :class:`Place`.
        setup: called once in the child before anything else; importable by name.
        restarts: how many dead children are replaced in an hour; above 0, calls with callbacks are refused.
        start: starts a child.

    Raises:
        ModelError: ``setup`` cannot go to another process.

    Example:
        >>> async def main() -> int:
        ...     with Process("length") as process:
        ...         return await process.host(list).call("measure", len)
        >>> anyio.run(main)
        0
    """

    what: ClassVar[str] = "process"
    """The child, in the error of a closed place."""

    def __init__(self, name: str, *, setup: Setup = None, restarts: int = 0, start: Start = ChildProcess) -> None:
        super().__init__(name)
        require_whole("restarts", restarts, 0)
        self._restarts = restarts
        self._restart_times: deque[float] = deque()
        self._setup = setup
        self._start = start
        self._child = start(name, setup)
        self._aborted = False
        self._instances: list[ChildInstance[Any]] = []
        self._loads: dict[int, Callable[[], Packet]] = {}
        self._used: set[int] = set()
        self._bereft: set[int] = set()
        self._thread = Thread(name)
        self._turn = threading.Lock()

    @property
    def pid(self) -> int:
        return self._child.pids[0]

    @property
    def pids(self) -> tuple[int, ...]:
        return self._child.pids

    def host(self, make: Make[T], *, track: str = "") -> Hosted[T]:
        """Return the handle to an instance in the child; see :meth:`Hosting.host`.

        Where it shares memory with this process, another is made here over it: see :attr:`Hosted.here`.
        """
        number = len(self._instances)
        orders = self._child.orders(number, maker(make))
        shares = any(not isinstance(block, Gauge) for block in orders[0].parts)
        here = cast("T", make() if shares else None)
        hosted = ChildInstance(
            self, track or self.name, here, process=self, orders=orders, number=number, shares=shares
        )
        self._instances.append(hosted)
        return hosted

    def wait_until_ready(self) -> None:
        """Return when the child holds every instance; without this, each is made at its first call.

        Raises:
            ModelLost: a child died once too often.
            Exception: ``setup`` or ``make`` of an instance failed.
        """
        for instance in self._instances:
            with self._turn:
                failure = self._restarting(partial(self._created, instance), f"'create' for {instance.track!r}")
            if failure is not None:
                failure.result(self.name)

    async def call_in_child(self, priority: Priority, instance: ChildInstance[Any], label: str, call: Call) -> object:
        callbacks = Callbacks()
        stubbed = callbacks.extract(call)
        if callbacks and self._restarts:
            raise ProtocolError(
                f"{label!r} for {instance.track!r} calls back, and what it said would be lost with a process that is "
                f"replaced, but {self.name!r} has restarts={self._restarts}: expected restarts=0"
            )
        packet = pack_with_blocks(stubbed) if callbacks else pack(stubbed)

        def ask() -> Outcome:
            if (failure := self._created(instance)) is not None:
                return failure
            if instance.number in self._bereft:
                self._bereft.remove(instance.number)
                raise SessionsLost(f"{instance.track!r} was lost with the process of {self.name!r}, and works again")
            self._used.add(instance.number)
            return self._child.ask(packet, callbacks)

        return await self._answered(priority, instance.track, label, ask)

    async def load_in_child(self, priority: Priority, instance: ChildInstance[Any], call: Call, loaded: Loaded) -> None:
        packed: Callable[[], Packet] = partial(self._child.packed_load, call)
        if all(each.lasts for each in call.args if isinstance(each, Bulk)):
            packed = cache(packed)

        def load() -> Outcome:
            outcome = self._created(instance) or self._child.ask(packed())
            if outcome.error is None:
                if self._restarts:
                    self._loads[instance.number] = packed
                if loaded is not None:
                    loaded()
            return outcome

        await self._answered(priority, instance.track, "load", load)

    async def _answered(self, priority: Priority, track: str, label: str, ask: Callable[[], Outcome]) -> object:
        context = observe.work_context()

        def answer() -> object:
            self.at_work = f"{track}: {label}"
            try:
                with self._turn:
                    outcome = self._restarting(ask, f"{label!r} for {track!r}")
            finally:
                self.at_work = ""
            self.listener(context.span(track, label, outcome.start, outcome.end))
            return outcome.result(self.name)

        return await self._in_turn(priority, label, answer)

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        # The child is idle meanwhile.
        context = observe.work_context()

        def run() -> R:
            with self._reported(track, label, context):
                return work(*args, **kwargs)

        return await self._in_turn(priority, label, run)

    async def _in_turn(self, priority: Priority, label: str, work: Callable[[], R]) -> R:
        self._require_open(f"{self.what} of", label)
        return await self._thread.call_at(priority, self.name, label, work)

    def _created(self, instance: ChildInstance[Any]) -> Outcome | None:
        # The failure, if there is one.
        if instance.number in self._child.created:
            return None
        outcome = self._child.create(instance.number, instance.orders)
        if outcome.error is None and (load := self._loads.get(instance.number)) is not None:
            outcome = self._child.ask(load())
        if outcome.error is not None:
            return outcome
        self._child.created.add(instance.number)
        return None

    def _restarting(self, exchange: Callable[[], R], doing: str) -> R:
        # ``exchange`` is repeated with a new child whenever one dies.
        while True:
            try:
                return exchange()
            except Gone as gone:
                who = gone.who or f"the process of {self.name!r} ({self._child.whereabouts})"
                self._restart(f"{who} {gone} while it did {doing}{gone.sequel}")

    def _restart(self, death: str) -> None:
        now = observe.now()
        while self._restart_times and self._restart_times[0] <= now - RESTART_WINDOW:
            self._restart_times.popleft()
        if self._aborted or len(self._restart_times) >= self._restarts:
            hours = RESTART_WINDOW / 3600
            limit = f"; no more than restarts={self._restarts} dead processes are replaced in {hours:g} h"
            raise ModelLost(death + (limit if self._restarts and not self._aborted else "")) from None
        self._restart_times.append(now)
        self._child.end()
        logger.warning(f"{death}: it is started again ({len(self._restart_times)} of {self._restarts})")
        self._bereft |= self._used
        self._used.clear()
        self._child = self._start(self.name, self._setup)
        if self._aborted:  # while the child started
            self._child.kill()

    def abort(self) -> None:
        """Kill the child for good: the call in progress and later ones raise ``ModelLost``; safe from any thread."""
        self._aborted = True
        self._child.kill()

    def close(self) -> None:
        """End the child after the call in progress; idempotent."""
        super().close()
        self._thread.close()
        self._child.end()


@dataclass(frozen=True, eq=False, kw_only=True)
class ChildInstance(Hosted[T]):
    process: Process
    orders: Sequence[Packet]
    number: int
    shares: bool

    @property
    def here(self) -> T:
        if not self.shares:
            raise ModelError(f"{self.track!r} shares no memory with this process: {self.place.name!r} has it")
        return self._here

    async def _call(
        self, label: str, work: Callable[..., object], args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> object:
        return await self.process.call_in_child(self._priority, self, label, Call(self.number, work, args, kwargs))

    async def _load(self, work: Callable[..., object], weights: object, loaded: Loaded) -> None:
        if self.shares:
            await super()._load(work, weights, loaded)
        else:
            await self.process.load_in_child(self._priority, self, Call(self.number, work, (weights,)), loaded)


class DisposableProcess(Generic[T]):
    """An object in a child process of its own, for code that may also hold the interpreter lock or crash.

    Calls are made one at a time. The first starts the child, unless :meth:`start` has; the next replaces a dead one.
    A caller that is cancelled does not wait: the child is killed.

    Args:
        instance: can be pickled, importable by name.
        timeout: seconds of a call, without the start. The call is then interrupted; a child that goes on for
            :data:`INTERRUPTED` is killed.
    """

    def __init__(self, name: str, instance: T, *, timeout: float = math.inf) -> None:
        self._name = name
        self._timeout = timeout
        self._create = pack_with_blocks(Call(None, partial(_itself, instance), makes=0))
        self._child: ChildProcess | None = None
        self._turn = anyio.Lock()

    async def start(self) -> None:
        async with self._turn:
            await self._started()

    async def call(self, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        packet = pack(Call(0, work, args, kwargs))
        async with self._turn:
            child = await self._started()
            with self._disposed_of():
                asked = self._asked(child, packet)
                with anyio.move_on_after(self._timeout):
                    return cast("R", await result_of(asked))
                child.interrupt()
                with anyio.move_on_after(INTERRUPTED), suppress(Exception):
                    await result_of(asked)
                if not asked.done() or isinstance(asked.exception(), Gone):
                    self.close()
                raise TimeoutError

    async def _started(self) -> ChildProcess:
        if self._child is None:
            self._child = child = ChildProcess(self._name, heed_interrupts)
            with self._disposed_of(Exception):
                await result_of(self._asked(child, self._create))
            return child
        return self._child

    def _asked(self, child: ChildProcess, packet: Packet) -> Future[object]:
        return in_thread(f"oppo-{self._name}", lambda: child.ask(packet).result(self._name))

    @contextmanager
    def _disposed_of(self, *errors: type[Exception]) -> Iterator[None]:
        # Kills the child where the body is cancelled, the child is found dead, or one of ``errors`` is raised.
        try:
            yield
        except Gone as gone:
            self.close()
            raise ModelLost(f"the process of {self._name!r} {gone}") from None
        except (anyio.get_cancelled_exc_class(), *errors):
            self.close()
            raise

    def close(self) -> None:
        """Kill the child, whatever it is doing; idempotent."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()


def _itself(instance: T) -> T:
    return instance
