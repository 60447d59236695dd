"""The messages between a process and a child that it started, how they cross the socket, and callbacks.

Each order has one outcome, in order. Before the outcome of a call the child may send requests for its callbacks; each
has a reply, unless it is one-way. Messages are pickled, which is safe here and nowhere else: the socket has no name,
only the child holds its other end, and no pickle is ever written to or read from a file. Blocks of shared memory travel
beside the pickle, as file descriptors; where memory is not shared, large things (:class:`Bulk`) travel beside it.
Packing a message that cannot go to another process raises a ``ModelError``.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pickle import HIGHEST_PROTOCOL, Pickler, PicklingError, Unpickler, dumps
from types import FunctionType
from typing import Generic, NamedTuple, ParamSpec, TypeVar, cast

from oppo.errors import ModelError, OppoError
from oppo.placement.shared_memory import Block

P = ParamSpec("P")
R = TypeVar("R")

_COUNT = 2
"""Bytes at the head of a message that hold the number of blocks after it."""


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
    """What an order returned or raised, and when the child began and ended it.

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
    """Crosses to the child in place of a callback."""

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
        """Return the same for another machine."""
        return self


class Packet(NamedTuple):
    """A pickled message, and what goes beside it: shared memory, or large things or references to them in a store."""

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
    """Return ``message`` pickled; an object for which ``aside`` returns a number is replaced by that number."""
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
