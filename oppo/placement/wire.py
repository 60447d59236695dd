"""What goes over the socket between a process and the child it has started, and how.

Each order is answered once, in order. Before the answer of a call the child may send requests for its callbacks; each
is replied to, unless it is one-way. Orders and answers are pickled, which is safe here and nowhere else: the
socket has no name, its other end is held by nobody but the child, and nothing pickled is ever written down or read from
a file. Blocks of shared memory go beside the pickle, as file descriptors.
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
from typing import NamedTuple, TypeAlias

from oppo.errors import ModelError, OppoError
from oppo.placement.block import Block

_COUNT = 2
"""Bytes at the head of a message that say how many blocks follow it."""

Bind: TypeAlias = Callable[[object], object]
"""Makes, of the stub of a callback, what can be called; of any other argument itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Create:
    """The order to take a instance in under a number."""

    number: int
    instance: object

    def carry_out(self, instances: dict[int, object], bind: Bind) -> None:
        """Take it in."""
        del bind
        instances[self.number] = self.instance


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The order to call a function with a instance, or with none, and arguments."""

    instance: int | None
    work: Callable[..., object]
    args: tuple[object, ...] = ()
    kwargs: Mapping[str, object] = field(default_factory=dict)

    def carry_out(self, instances: dict[int, object], bind: Bind) -> object:
        """Return what the function returns."""
        first = () if self.instance is None else (instances[self.instance],)
        return self.work(*first, *map(bind, self.args), **{name: bind(value) for name, value in self.kwargs.items()})


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """What an order came to, and when the child was at it, by :data:`oppo.observe.now`."""

    start: float
    end: float
    value: object


@dataclass(frozen=True, slots=True, eq=False)
class Failure:
    """The error that an order came to.

    Attributes:
        report: its traceback in words; empty where it was raised in this process, by a callback.
    """

    start: float
    end: float
    error: BaseException
    report: str = ""

    def told_of(self, place: str) -> BaseException:
        """Return the error; one that was not raised on purpose says in a note where in the child it arose."""
        if self.report and not isinstance(self.error, OppoError):
            self.error.add_note(f"in the process of {place!r}:\n{self.report}".rstrip())
        return self.error


class Packet(NamedTuple):
    """A message, pickled, and the blocks that it mentions."""

    data: bytes
    blocks: Sequence[Block] = ()


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
    """Return ``message`` pickled, without the objects for which ``aside`` gives a number: only that goes in.

    Raises:
        ModelError: something in it cannot go to another process.
    """
    file = io.BytesIO()
    with _crossing():
        _Packer(file, aside).dump(message)
    return file.getvalue()


def unpacked(data: bytes, fetch: Callable[[int], object]) -> object:
    """Return what was :func:`packed`; ``fetch`` gives what was set aside under a number."""
    return _Unpacker(data, fetch).load()


def pack(message: object) -> Packet:
    """Return ``message``, which mentions no blocks, ready to be sent; quick, as calls and answers are many.

    Raises:
        ModelError: something in it cannot go to another process.
    """
    with _crossing():
        return Packet(dumps(message, HIGHEST_PROTOCOL))


def pack_with_blocks(message: object) -> Packet:
    """Return ``message`` ready to be sent, and with it the blocks that it mentions.

    Raises:
        ModelError: something in it cannot go to another process.
    """
    blocks: list[Block] = []

    def aside(part: object) -> int | None:
        if not isinstance(part, Block):
            return None
        blocks.append(part)
        return len(blocks) - 1

    return Packet(packed(message, aside), blocks)


def unpack(packet: Packet) -> object:
    """Return the message of ``packet``."""
    return unpacked(packet.data, packet.blocks.__getitem__)


@contextmanager
def _crossing() -> Iterator[None]:
    try:
        yield
    except (PicklingError, TypeError, AttributeError) as error:
        raise ModelError(
            f"this cannot go to another process: {error}; functions and classes must be importable by name"
        ) from error


def send(connection: Connection[bytes, bytes], packet: Packet) -> None:
    """Send a packet.

    Raises:
        OSError: nobody is at the other end.
    """
    connection.send_bytes(len(packet.blocks).to_bytes(_COUNT, sys.byteorder) + packet.data)
    for block in packet.blocks:
        send_handle(connection, block.fileno(), 0)


def receive(connection: Connection[bytes, bytes]) -> Packet:
    """Return the next packet; its blocks are mapped in this process.

    Raises:
        EOFError, OSError: nobody is at the other end.
    """
    data = connection.recv_bytes()
    count = int.from_bytes(data[:_COUNT], sys.byteorder)
    return Packet(data[_COUNT:], [Block(recv_handle(connection)) for _ in range(count)])
