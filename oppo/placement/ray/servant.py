"""The actor: it holds instances and answers orders, as a child process of this machine does.

In a call that calls back, requests wait until the driver fetches them, and replies until the work reads them::

    work      --request-->  Conversation  <--fetch, which waits--   driver      in threads of their own
    work      <---reply---  Conversation  <--------reply---------   driver
"""

from __future__ import annotations

import os
import platform
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Final, NamedTuple, TypeAlias

import ray

from oppo.placement.wire import Packet, pack_with_bulk
from oppo.placement.worker import Requests, answer


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where an actor has started; ``versions``: of what must be the same there and here."""

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


Gauges: TypeAlias = Mapping[int, bytes]
"""The bytes of gauges, by number."""

Answered: TypeAlias = tuple[bytes, Sequence[object], Gauges]
"""An answer, pickled, its large things, and the gauges."""

LINGER: Final = 0.005
"""Seconds that a request which nothing waits for may wait for others: fetching each alone would slow the work down."""


class Conversation:
    """The requests of one call, and the replies and notices for it."""

    def __init__(self) -> None:
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
    """Answers orders in one thread, one at a time; what belongs to an order in progress comes and goes in others."""

    def __init__(self) -> None:
        self._instances: dict[int, object] = {}
        self._turn = threading.Lock()
        self._gauges: dict[int, bytearray] = {}
        self._number = 0
        self._conversation = Conversation()

    def arrive(self) -> Arrival:
        return Arrival(os.getpid(), ray.util.get_node_ip_address(), versions())

    def answer(self, data: bytes, copies: Sequence[Copy], *bulk: object) -> Answered:
        return self._answered(Packet(data, bulk=self._blocks(copies) or bulk), bind=_as_it_is)

    def converse(self, number: int, data: bytes, copies: Sequence[Copy], *bulk: object) -> Answered:
        conversation = self._of(number)
        try:
            packet = Packet(data, bulk=self._blocks(copies, conversation) or bulk)
            return self._answered(packet, bind=Requests(conversation).bind)
        finally:
            conversation.end()

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
        # What comes too late is of a conversation that nobody reads.
        with self._turn:
            if number > self._number:
                self._number, self._conversation = number, Conversation()
            return self._conversation if number == self._number else Conversation()

    def _blocks(self, copies: Sequence[Copy], conversation: Conversation | None = None) -> list[bytearray]:
        blocks = []
        for copy in copies:
            if copy.gauge:
                with self._turn:
                    blocks.append(self._gauges.setdefault(copy.number, bytearray(copy.content)))
            elif conversation is not None:
                blocks.append(conversation.notice(copy.number, copy.content))
        return blocks

    def _read(self) -> Gauges:
        with self._turn:
            return {number: bytes(gauge) for number, gauge in self._gauges.items()}

    def _answered(self, packet: Packet, bind: Callable[[object], object]) -> Answered:
        answered = answer(packet, self._instances, bind=bind, seal=pack_with_bulk)
        if answered is None:
            raise AssertionError("a refusal came as an order")
        return answered.data, answered.bulk, self._read()


GROUPS: Final = {"listen": 1, "talk": 1}
"""The threads of an actor beside the one that answers orders: what comes to each is done in order."""


def _as_it_is(argument: object) -> object:
    return argument
