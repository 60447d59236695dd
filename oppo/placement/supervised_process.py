"""The instances of a child process, in this child and in those that take its place; synchronous."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from oppo import observe
from oppo.errors import ModelLost, ProtocolError
from oppo.numeric import require_whole
from oppo.placement.callback import Callbacks
from oppo.placement.child import Child, Gone
from oppo.placement.place import Journal
from oppo.placement.wire import Answer, Call, Create, Failure, Packet, pack, pack_with_blocks

A = TypeVar("A")

STRETCH = 3600.0
"""Seconds: a process that dies so often in an hour has a fault that stays; one in a day is an accident."""


@dataclass(frozen=True, slots=True, eq=False)
class HostedInstance:
    """A instance, and all that is needed to make it again.

    Attributes:
        number: by which orders name it.
        track: of its spans, and its name in errors.
        create: makes it.
        journal: what it is told then.
    """

    number: int
    track: str
    create: Packet
    journal: Journal | None


class SupervisedProcess:
    """A child process with instances; one that dies is replaced, its instances are made again and told what they knew.

    A instance is made in a child when it is first needed there, so that nobody is told anything at a time at which
    nothing is asked of it.

    Args:
        name: of the place.
        setup: called once in each child before anything else.
        restarts: how many dead children are replaced in any stretch of :data:`STRETCH` seconds.
        tell: told, in a sentence, of each.
    """

    def __init__(
        self, name: str, *, setup: Callable[[], object] | None, restarts: int, tell: Callable[[str], None]
    ) -> None:
        self._name = name
        self._setup = setup
        require_whole("restarts", restarts, 0)
        self._restarts = restarts
        self._restarted: deque[float] = deque()
        self._aborted = False
        self._tell = tell
        self._entries: list[HostedInstance] = []
        self._child = Child(name, setup)
        self._turn = threading.Lock()

    @property
    def pid(self) -> int:
        """The number of the child process."""
        return self._child.pid

    def admit(self, instance: object, track: str, journal: Journal | None) -> HostedInstance:
        """Return a entry for ``instance``, pickled as it is now.

        Raises:
            ModelError: it cannot go to another process.
        """
        number = len(self._entries)
        entry = HostedInstance(number, track, pack_with_blocks(Create(number, instance)), journal)
        self._entries.append(entry)
        return entry

    def wait_until_ready(self) -> None:
        """Return when every instance is made in the child.

        Raises:
            ModelLost: the child died once too often.
            Exception: ``setup`` or the making of a instance failed.
        """
        for entry in self._entries:
            with self._turn:
                failure = self._lasting(partial(self._created, entry), f"'create' for {entry.track!r}")
            if failure is not None:
                raise failure.told_of(self._name)

    def answer(
        self, entry: HostedInstance, label: str, order: Call, packet: Packet, callbacks: Callbacks
    ) -> Answer | Failure:
        """Return what an order, and the packet it is in, comes to: in this child or in one that takes its place.

        Raises:
            ModelLost: the child died once too often.
            ProtocolError: the order has callbacks, and could be repeated in another child.
        """
        if callbacks and self._restarts:
            raise ProtocolError(
                f"{label!r} for {entry.track!r} calls back, so it cannot be repeated in another process, but "
                f"{self._name!r} has restarts={self._restarts}: expected a Process with restarts=0"
            )
        with self._turn:
            answer = self._lasting(
                lambda: self._created(entry) or self._child.ask(packet, callbacks), f"{label!r} for {entry.track!r}"
            )
        if isinstance(answer, Answer) and entry.journal is not None and self._restarts:
            entry.journal.note(order.work, order.args)
        return answer

    def abort(self) -> None:
        """Kill the child, and replace it no more: a call in progress is lost; safe to call from any thread."""
        self._aborted = True
        self._child.kill()

    def close(self) -> None:
        """End the child; idempotent."""
        self._child.end()

    def _lasting(self, talk: Callable[[], A], doing: str) -> A:
        """Return what ``talk`` returns, begun again with a new child whenever one dies, as often as that may be.

        Raises:
            ModelLost: it may not be any more.
        """
        while True:
            try:
                return talk()
            except Gone as gone:
                self._replace(f"the process of {self._name!r} (pid {self.pid}) {gone} while it did {doing}")

    def _created(self, entry: HostedInstance) -> Failure | None:
        """Make the instance in this child unless it is there, and tell it what its journal holds."""
        if entry.number in self._child.created:
            return None
        packets = [entry.create]
        if entry.journal is not None:
            packets += [pack(Call(entry.number, work, args)) for work, args in entry.journal.replay()]
        for packet in packets:
            answer = self._child.ask(packet)
            if isinstance(answer, Failure):
                return answer
        self._child.created.add(entry.number)
        return None

    def _replace(self, lost: str) -> None:
        """Start a child in the place of one that is dead.

        Raises:
            ModelLost: that has been done as often as it may.
        """
        now = observe.now()
        while self._restarted and self._restarted[0] <= now - STRETCH:
            self._restarted.popleft()
        if self._aborted or len(self._restarted) >= self._restarts:
            limit = f"; no more than restarts={self._restarts} dead processes are replaced in {STRETCH / 3600:g} h"
            raise ModelLost(lost + (limit if self._restarts and not self._aborted else "")) from None
        self._restarted.append(now)
        self._child.end()
        self._tell(f"{lost}: it is started again ({len(self._restarted)} of {self._restarts})")
        self._child = Child(self._name, self._setup)
        if self._aborted:  # while it was started
            self._child.kill()
