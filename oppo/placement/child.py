"""The contract of a child: a process, of this machine or another, that holds instances and executes orders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TypeAlias

from oppo.placement.callback import Callbacks
from oppo.placement.wire import Outcome, Packet

Setup: TypeAlias = Callable[[], object] | None
"""A function that a child calls once, before anything else."""


class Gone(Exception):  # noqa: N818 - it says what happened; caught in this package, never seen outside
    """The child is dead; the message says how it died."""


class Child(ABC):
    """A process that holds instances and executes orders, one at a time.

    Attributes:
        created: the numbers of the instances that it holds, kept by its owner.
    """

    def __init__(self) -> None:
        self.created: set[int] = set()

    @property
    @abstractmethod
    def pid(self) -> int:
        """The number of the process, on its machine."""

    @property
    def whereabouts(self) -> str:
        """How to find the process, for errors."""
        return f"pid {self.pid}"

    @abstractmethod
    def ask(self, packet: Packet, callbacks: Callbacks | None = None) -> Outcome:
        """Send an order and return its answer; a failed setup is the answer to the first order instead.

        Callbacks of the order run here, in this thread.

        Raises:
            Gone: the child is dead, or dies meanwhile.
        """

    @abstractmethod
    def end(self) -> None:
        """Let the child exit, which has no order in progress; idempotent."""

    @abstractmethod
    def kill(self) -> None:
        """Kill the child, whatever it is doing; a thread that waits for an answer gets :class:`Gone`."""


Start: TypeAlias = Callable[[str, Setup], Child]
"""Starts a child of this name, without waiting for it, with its setup."""
