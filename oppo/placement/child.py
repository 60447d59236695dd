"""A child process: the messages that it receives, and how it executes them, answers, and calls back.

Each order has one outcome, in order. Before the outcome of a call the child may send requests for its callbacks; each
has a reply, unless it is one-way. Messages are pickled, which is safe here and nowhere else: the socket has no name,
only the child holds its other end, and no pickle is ever written to or read from a file. Blocks of shared memory travel
beside the pickle, as file descriptors; where memory is not shared, large things (:class:`Bulk`) travel beside it.
Packing a message that cannot go to another process raises a ``ModelError``.
"""

from __future__ import annotations

import fcntl
import io
import os
import select
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pickle import HIGHEST_PROTOCOL, Pickler, PicklingError, Unpickler, dumps
from types import FrameType, FunctionType
from typing import Generic, NamedTuple, NoReturn, ParamSpec, TextIO, TypeVar, cast

from oppo import observe
from oppo.errors import ModelError, OppoError
from oppo.placement.shared_memory import Block
from oppo.redact import HarmlessStream

P = ParamSpec("P")
R = TypeVar("R")

_COUNT = 2  # bytes at the head of a message that hold the number of blocks after it


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """An order to call a method of an instance, by its number, or a function; ``makes``: the instance it returns."""

    instance: int | None
    work: Callable[..., object]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)
    makes: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """The result or error of an order, and when the child began and ended it.

    ``report``: the traceback of the error, empty if a callback raised it in this process.
    """

    start: float
    end: float
    value: object = None
    error: BaseException | None = None
    report: str = ""

    def result(self, process: str) -> object:
        if self.error is None:
            return self.value
        if self.report and not isinstance(self.error, OppoError):
            self.error.add_note(f"in the process of {process!r}:\n{self.report}".rstrip())
        raise self.error


@dataclass(frozen=True, slots=True, eq=False)
class Callback(Generic[P, R]):
    """An argument of :meth:`Hosted.call` that the work may call until the call ends.

    In :class:`~oppo.placement.Inline` and :class:`~oppo.placement.Thread` it is a plain call. From another process the
    child sends the arguments, and this process runs the function, in the thread that waits for the answer of the call;
    arguments and results must be picklable. An error of the function ends the call and is raised as itself. A place
    with ``restarts`` refuses callbacks.

    Args:
        function: safe to be called from another thread.
        oneway: it returns nothing, and the work does not wait for it to run.
    """

    function: Callable[P, R]
    oneway: bool = False

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)


@dataclass(frozen=True, slots=True)
class Stub:
    number: int
    oneway: bool


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """Sent by a child in the middle of a call: the arguments for a callback."""

    stub: Stub
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """``failed``: a callback has, so the child must end the call."""

    value: object = None
    failed: bool = False


class Bulk:
    """Something large, such as weights; pickled, its buffers may be taken out of band (PEP 574)."""

    @property
    def lasts(self) -> bool:
        """Whether one pickle of it can be read several times, and later."""
        return True

    def portable(self) -> Bulk:
        return self


class Packet(NamedTuple):
    """A pickled message, and beside it shared memory, or large objects or references to them in a store."""

    data: bytes
    parts: Sequence[object] = ()


class _Packer(Pickler):
    def __init__(self, file: io.BytesIO, aside: Callable[[object], int | None]) -> None:
        super().__init__(file, HIGHEST_PROTOCOL)
        self._aside = aside

    def persistent_id(self, obj: object) -> int | None:
        if isinstance(obj, type | FunctionType) and obj.__module__ == "__main__":
            raise ModelError(
                f"{obj.__qualname__} is defined in the program itself, which another process does not run again: put "
                "it into a module that can be imported, or choose a Thread instead of a Process"
            )
        return self._aside(obj)


class _Unpacker(Unpickler):
    def __init__(self, data: bytes, fetch: Callable[[int], object]) -> None:
        super().__init__(io.BytesIO(data))
        self._fetch = fetch

    def persistent_load(self, pid: int) -> object:
        return self._fetch(pid)


def packed(message: object, aside: Callable[[object], int | None]) -> bytes:
    file = io.BytesIO()
    with _crossing():
        _Packer(file, aside).dump(message)
    return file.getvalue()


def unpacked(data: bytes, fetch: Callable[[int], object]) -> object:
    return _Unpacker(data, fetch).load()


def pack(message: object) -> Packet:
    # Without looking for parts: the fast way, as calls and answers are many.
    with _crossing():
        return Packet(dumps(message, HIGHEST_PROTOCOL))


def pack_with_blocks(message: object) -> Packet:
    return _pack_with(Block, message)


def pack_with_bulk(message: object) -> Packet:
    return _pack_with(Bulk, message)


def _pack_with(kind: type[Block | Bulk], message: object) -> Packet:
    parts: list[object] = []

    def aside(part: object) -> int | None:
        if not isinstance(part, kind):
            return None
        parts.append(part.portable() if isinstance(part, Bulk) else part)
        return len(parts) - 1

    return Packet(packed(message, aside), parts)


def unpack(packet: Packet) -> object:
    return unpacked(packet.data, packet.parts.__getitem__)


@contextmanager
def _crossing() -> Iterator[None]:
    try:
        yield
    except (PicklingError, TypeError, AttributeError) as error:
        raise ModelError(
            f"this cannot go to another process: {error}; functions and classes must be importable by name"
        ) from error


def send(connection: Connection[bytes, bytes], packet: Packet) -> None:
    connection.send_bytes(len(packet.parts).to_bytes(_COUNT, sys.byteorder) + packet.data)
    for block in packet.parts:
        send_handle(connection, cast("Block", block).fileno(), 0)


def receive(connection: Connection[bytes, bytes]) -> Packet:
    data = connection.recv_bytes()
    count = int.from_bytes(data[:_COUNT], sys.byteorder)
    return Packet(data[_COUNT:], [Block(recv_handle(connection)) for _ in range(count)])


class Callbacks:
    """The callbacks among the arguments of one call; none runs after one has failed."""

    def __init__(self) -> None:
        self.error: BaseException | None = None
        self._callbacks: list[Callback[..., object]] = []

    def __len__(self) -> int:
        return len(self._callbacks)

    def extract(self, call: Call) -> Call:
        kwargs = {name: self._stub(value) for name, value in call.kwargs.items()}
        return replace(call, args=tuple(map(self._stub, call.args)), kwargs=kwargs)

    def _stub(self, argument: object) -> object:
        if not isinstance(argument, Callback):
            return argument
        self._callbacks.append(argument)
        return Stub(len(self._callbacks) - 1, argument.oneway)

    def run(self, request: Request) -> Packet | None:
        if self.error is not None:
            return None
        try:
            value = self._callbacks[request.stub.number](*request.args, **request.kwargs)
            return None if request.stub.oneway else pack(Reply(value))
        except BaseException as error:  # noqa: BLE001 - the call raises it
            self.error = error
            return pack(Reply(failed=True))

    def over(self, outcome: Outcome) -> Outcome:
        """Return the outcome of the call; an error of a callback takes its place."""
        return outcome if self.error is None else Outcome(outcome.start, outcome.end, error=self.error)


def die_with(lifeline: int) -> None:
    """Kill this process when the last process that could write to the pipe ``lifeline`` has closed it or is dead."""
    # On Linux the system itself sends the signal, so code that holds the interpreter lock dies too. PR_SET_PDEATHSIG
    # would not do: it follows the thread that started this process, which may end long before its process.
    hang_up = select.poll()
    hang_up.register(lifeline, 0)  # reports a hang-up only
    if sys.platform != "linux":
        threading.Thread(target=_exit_after, args=(hang_up,), name="oppo-lifeline", daemon=True).start()
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    if hang_up.poll(0):  # it came before there was an owner to kill
        exit_at_once()


def exit_at_once() -> NoReturn:
    # There is nothing to save, and an orderly shutdown with torch loaded takes seconds.
    os._exit(0)


def _exit_after(hang_up: select.poll) -> None:
    hang_up.poll()
    exit_at_once()


class OverdueError(BaseException):
    """Ends a call that takes longer than its caller waits; not an ``Exception``, so that few handlers catch it."""


_calls = 0  # calls in progress in this process


def heed_interrupts() -> None:
    """Let SIGUSR1 end the call in progress, by an :class:`OverdueError` in its thread, the main one."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        if _calls:
            raise OverdueError

    signal.signal(signal.SIGUSR1, interrupt)


class CallbackFailedError(Exception):
    """A callback failed in the parent, which raises its error; this one ends the call in the child."""


class Caller(ABC):
    """The way of a call to its caller, for its callbacks."""

    def __init__(self) -> None:
        self._failed = False

    @abstractmethod
    def send(self, request: Packet) -> None:
        """Send a request, without waiting for its reply."""

    @abstractmethod
    def receive(self) -> Packet:
        """Return the next reply; wait for it."""

    @abstractmethod
    def has_come(self) -> bool:
        """Return whether a reply is there."""

    def bind(self, argument: object) -> object:
        return partial(self._request, argument) if isinstance(argument, Stub) else argument

    def _request(self, stub: Stub, /, *args: object, **kwargs: object) -> object:
        if not self._failed:
            self.send(pack(Request(stub, args, kwargs)))
            if stub.oneway and not self.has_come():
                return None
            reply = cast("Reply", unpack(self.receive()))
            if not reply.failed:
                return reply.value
            self._failed = True
        raise CallbackFailedError


class _SocketCaller(Caller):
    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        super().__init__()
        self._connection = connection
        self._replies = select.poll()  # many times as fast as the connection's own poll()
        self._replies.register(connection, select.POLLIN)

    def send(self, request: Packet) -> None:
        send(self._connection, request)

    def receive(self) -> Packet:
        return receive(self._connection)

    def has_come(self) -> bool:
        return bool(self._replies.poll(0))


def serve(fd: int, lifeline: int) -> None:
    """Answer the orders that come over the socket ``fd`` until the parent closes it, and exit."""
    # Ctrl-C is left to the parent. What user code prints here is shown without secrets and control characters.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    os.set_inheritable(lifeline, False)
    die_with(lifeline)
    sys.stdout, sys.stderr = cast("TextIO", HarmlessStream(sys.stdout)), cast("TextIO", HarmlessStream(sys.stderr))
    connection: Connection[bytes, bytes] = Connection(fd)
    instances: dict[int, object] = {}
    with suppress(EOFError, ConnectionError):
        while True:
            answered = answer(receive(connection), instances, _SocketCaller(connection))
            if answered is not None:
                sys.stdout.flush()
                send(connection, answered)
    exit_at_once()


def answer(
    packet: Packet, instances: dict[int, object], caller: Caller, *, seal: Callable[[object], Packet] = pack
) -> Packet | None:
    """Execute an order and return its outcome; none to a reply for a callback of a call that is over."""
    start = observe.now()
    try:
        order = unpack(packet)
        if isinstance(order, Reply):
            return None
        value = _execute(cast("Call", order), instances, caller)
        return seal(Outcome(start, observe.now(), value))
    except Exception as error:  # noqa: BLE001 - the boundary to the parent, which raises it
        return _failure(error, start)


def _execute(call: Call, instances: dict[int, object], caller: Caller) -> object:
    first = () if call.instance is None else (instances[call.instance],)
    kwargs = {name: caller.bind(value) for name, value in call.kwargs.items()}
    with _in_progress():
        value = call.work(*first, *map(caller.bind, call.args), **kwargs)
    if call.makes is None:
        return value
    instances[call.makes] = value
    return None


@contextmanager
def _in_progress() -> Iterator[None]:
    global _calls  # noqa: PLW0603 - a signal handler reads it
    _calls += 1
    try:
        yield
    except OverdueError as error:
        raise TimeoutError("interrupted, since it took too long") from error
    finally:
        _calls -= 1


def _failure(error: Exception, start: float) -> Packet:
    report = "".join(traceback.format_exception(error))
    end = observe.now()
    try:
        packet = pack(Outcome(start, end, error=error, report=report))
        unpack(packet)
    except Exception:  # noqa: BLE001 - errors of other libraries pickle and unpickle as they please
        told = ModelError(f"{type(error).__name__}: {error}\n{report}".rstrip())
        return pack(Outcome(start, end, error=told, report=report))
    return packet
