"""The connection of this process, the driver, to a Ray cluster."""

from __future__ import annotations

import logging
import signal
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

import ray
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.exceptions import RayError

from oppo.errors import ConfigError, ModelLost, one_line
from oppo.placement.place import Closing

REACH: Final = 10.0
"""Seconds in which a cluster's head must accept a connection; Ray itself tries for a quarter of an hour."""

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What an actor takes of its machine, as Ray counts it.

    Attributes:
        cpus: cores; what computes there does so in as many threads, unless the setup says otherwise.
        gpus: CUDA devices, the only ones that the actor sees; a fraction shares one.
        resources: custom ones, by name.
    """

    cpus: int = 1
    gpus: float = 0.0
    resources: Mapping[str, float] = field(default_factory=dict)

    def bundle(self) -> dict[str, float]:
        return {"CPU": float(self.cpus), **({"GPU": self.gpus} if self.gpus else {}), **self.resources}

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
        """Return a reference to ``value``, which lies in the object store while the reference is held.

        Raises:
            ModelLost: the store has no room for it.
        """
        try:
            return ray.put(value)
        except RayError as error:
            raise ModelLost(
                f"the object store of this machine cannot take what is to be sent: {one_line(error)}"
            ) from error

    def free(self) -> str:
        found = ray.available_resources().items()
        return listed({name: amount for name, amount in found if ":" not in name and "_group_" not in name})

    def driver_address(self) -> str:
        return str(ray.util.get_node_ip_address())

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
    before = {number: signal.getsignal(number) for number in _SIGNALS if on_main_thread}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def listed(amounts: Mapping[str, float]) -> str:
    """Return amounts by name as text.

    Example:
        >>> listed({"CPU": 2.0, "GPU": 0.5})
        '2 CPU, 0.5 GPU'
    """
    return ", ".join(f"{amount:g} {name}" for name, amount in sorted(amounts.items())) or "nothing"
