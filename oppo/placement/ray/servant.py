"""The actor: it holds instances and answers orders, as a child process of this machine does."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

import ray

from oppo.placement.wire import Packet, pack_with_bulk
from oppo.placement.worker import answer


@dataclass(frozen=True, slots=True)
class Arrival:
    """What an actor tells of itself when it has started.

    Attributes:
        address: of its machine in the cluster.
        versions: of what must be the same there and here.
    """

    pid: int
    address: str
    versions: dict[str, str]


def versions() -> dict[str, str]:
    """Return the versions of what pickles messages, and of what they name."""
    return {"Python": platform.python_version(), **{name: version(name) for name in ("oppo", "numpy")}}


class Servant:
    """Answers orders in the main thread of its process, one at a time."""

    def __init__(self) -> None:
        self._instances: dict[int, object] = {}

    def arrive(self) -> Arrival:
        """Return where this is."""
        return Arrival(os.getpid(), ray.util.get_node_ip_address(), versions())

    def answer(self, data: bytes, *bulk: object) -> tuple[bytes, Sequence[object]]:
        """Return the answer to an order, and what is large in it.

        Args:
            data: the order, pickled.
            bulk: what is large in it, fetched from the object store.
        """
        packet = answer(Packet(data, bulk=bulk), self._instances, bind=_as_it_is, seal=pack_with_bulk)
        if packet is None:
            raise AssertionError("an order was refused that called back")
        return packet.data, packet.bulk


def free_port() -> int:
    """Return a port of this machine that nothing listens on now."""
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def _as_it_is(argument: object) -> object:
    return argument
