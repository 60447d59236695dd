"""The messages between a process and a child that it started, and how they cross the socket.

Each order has one answer, in order. Before the answer to a call the child may send requests for its callbacks; each
has a reply, unless it is one-way. Messages are pickled, which is safe here and nowhere else: the socket has no name,
only the child holds its other end, and no pickle is ever written to or read from a file. Blocks of shared memory travel
beside the pickle, as file descriptors; where memory is not shared, what is large (:class:`Bulk`) travels beside it.
Packing a message that cannot go to another process raises a ``ModelError``.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from pickle import HIGHEST_PROTOCOL, Pickler, PicklingError, Unpickler, dumps
from types import FunctionType
from typing import NamedTuple, NoReturn, TypeAlias

from oppo.errors import ModelError, OppoError
from oppo.placement.block import Block

_COUNT = 2
"""Bytes at the head of a message that hold the number of blocks after it."""


@dataclass(frozen=True, slots=True, eq=False)
class Create:
    """The order to hold an instance under a number."""

    number: int
    instance: object


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The order to call a function with an instance, or with none, and arguments."""

    instance: int | None
    work: Callable[..., object]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What an order returned, and when the child began and ended it, by :data:`oppo.observe.now`."""

    start: float
    end: float
    value: object

    def result(self, process: str) -> object:
        """Return the value."""
        del process
        return self.value


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """The error that an order raised.

    Attributes:
        report: its formatted traceback; empty if a callback raised it, in this process.
    """

    start: float
    end: float
    error: BaseException
    report: str = ""

    def result(self, process: str) -> NoReturn:
        """Raise the error; one that is no ``OppoError`` has a note with its traceback in the child."""
        if self.report and not isinstance(self.error, OppoError):
            self.error.add_note(f"in the process of {process!r}:\n{self.report}".rstrip())
        raise self.error


Outcome: TypeAlias = Answer | Failure


class Bulk:
    """Something large, such as weights; pickled, its buffers may be taken out of band (PEP 574)."""


class Packet(NamedTuple):
    """A pickled message and what travels beside it.

    Attributes:
        blocks: the shared memory in it.
        bulk: the large things in it, or what stands for them in a store that the child reads.
    """

    data: bytes
    blocks: Sequence[Block] = ()
    bulk: Sequence[object] = ()


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
    """Return what was :func:`packed`; ``fetch`` returns the object that a number replaced."""
    return _Unpacker(data, fetch).load()


def pack(message: object) -> Packet:
    """Return ``message``, which holds no blocks, ready to be sent; the fast way, as calls and answers are many."""
    with _crossing():
        return Packet(dumps(message, HIGHEST_PROTOCOL))


def pack_with_blocks(message: object) -> Packet:
    """Return ``message`` ready to be sent, with the blocks in it."""
    blocks: list[Block] = []

    def aside(part: object) -> int | None:
        if not isinstance(part, Block):
            return None
        blocks.append(part)
        return len(blocks) - 1

    return Packet(packed(message, aside), blocks)


def pack_with_bulk(message: object) -> Packet:
    """Return ``message``, which holds no blocks, ready to be sent, with the large things in it beside it."""
    bulk: list[object] = []

    def aside(part: object) -> int | None:
        if not isinstance(part, Bulk):
            return None
        bulk.append(part)
        return len(bulk) - 1

    return Packet(packed(message, aside), bulk=bulk)


def unpack(packet: Packet) -> object:
    """Return the message of ``packet``, which holds blocks, or large things, or neither."""
    return unpacked(packet.data, (packet.blocks or packet.bulk).__getitem__)


@contextmanager
def _crossing() -> Iterator[None]:
    try:
        yield
    except (PicklingError, TypeError, AttributeError) as error:
        raise ModelError(
            f"this cannot go to another process: {error}; functions and classes must be importable by name"
        ) from error


def send(connection: Connection[bytes, bytes], packet: Packet) -> None:
    """Send a packet; raise an ``OSError`` if the other end is closed."""
    connection.send_bytes(len(packet.blocks).to_bytes(_COUNT, sys.byteorder) + packet.data)
    for block in packet.blocks:
        send_handle(connection, block.fileno(), 0)


def receive(connection: Connection[bytes, bytes]) -> Packet:
    """Return the next packet, its blocks mapped here; raise ``EOFError`` or ``OSError`` if the other end is closed."""
    data = connection.recv_bytes()
    count = int.from_bytes(data[:_COUNT], sys.byteorder)
    return Packet(data[_COUNT:], [Block(recv_handle(connection)) for _ in range(count)])
