"""A child under supervision: one that dies is replaced, and its instances with it; synchronous."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from oppo import observe
from oppo.declared import require_whole
from oppo.errors import ModelLost, ProtocolError
from oppo.placement.callback import Callbacks
from oppo.placement.child import Gone, Setup, Start
from oppo.placement.child_process import ChildProcess
from oppo.placement.place import Journal
from oppo.placement.wire import Answer, Call, Create, Failure, Outcome, Packet, pack, pack_with_blocks

A = TypeVar("A")

RESTART_WINDOW = 3600.0
"""Seconds over which restarts are counted: several deaths in an hour are a lasting fault, one in a day an accident."""


@dataclass(frozen=True, slots=True, eq=False)
class HostedInstance:
    """An instance, with what it takes to create it again.

    Attributes:
        number: identifies it in orders.
        track: of its spans, and its name in errors.
        create: the order that creates it in a child.
        journal: replayed then.
    """

    number: int
    track: str
    create: Packet
    journal: Journal | None


class SupervisedProcess:
    """A child with instances; a dead child is replaced, its instances are created again and replay their calls.

    A child creates an instance at its first call there, so no instance is replayed before it is needed. One that was
    sent weights gets the last ones before it replays anything. A child that died once too often is ``ModelLost``.

    Args:
        name: of the place.
        setup: called once in each child before anything else.
        restarts: how many dead children are replaced in any :data:`RESTART_WINDOW`.
        tell: called with a sentence about each restart.
        start: starts a child.
    """

    def __init__(
        self,
        name: str,
        *,
        setup: Setup,
        restarts: int,
        tell: Callable[[str], None],
        start: Start = ChildProcess,
    ) -> None:
        self._name = name
        self._setup = setup
        self._start = start
        require_whole("restarts", restarts, 0)
        self._restarts = restarts
        self._restart_times: deque[float] = deque()
        self._aborted = False
        self._tell = tell
        self._instances: list[HostedInstance] = []
        self._loads: dict[int, Packet] = {}
        self._child = start(name, setup)
        self._turn = threading.Lock()

    @property
    def pid(self) -> int:
        """The number of the child process."""
        return self._child.pid

    def host(self, instance: object, track: str, journal: Journal | None) -> HostedInstance:
        """Pickle ``instance`` as it is now, and return what identifies it in calls."""
        number = len(self._instances)
        hosted = HostedInstance(number, track, pack_with_blocks(Create(number, instance)), journal)
        self._instances.append(hosted)
        return hosted

    def wait_until_ready(self) -> None:
        """Return when the child holds every instance."""
        for hosted in self._instances:
            with self._turn:
                failure = self._restarting(partial(self._ensure_created, hosted), f"'create' for {hosted.track!r}")
            if failure is not None:
                failure.result(self._name)

    def call(self, hosted: HostedInstance, label: str, call: Call, packet: Packet, callbacks: Callbacks) -> Outcome:
        """Return the answer to ``call``, packed in ``packet``, from this child or one that replaces it."""
        if callbacks and self._restarts:
            raise ProtocolError(
                f"{label!r} for {hosted.track!r} calls back, so it cannot be repeated in another process, but "
                f"{self._name!r} has restarts={self._restarts}: expected restarts=0"
            )
        answer = self._answered(hosted, label, packet, callbacks)
        if isinstance(answer, Answer) and hosted.journal is not None and self._restarts:
            hosted.journal.note(call.work, call.args)
        return answer

    def load(self, hosted: HostedInstance, label: str, packet: Packet) -> Outcome:
        """Return the answer to a call with weights, which an instance that is created again gets again."""
        answer = self._answered(hosted, label, packet, Callbacks())
        if isinstance(answer, Answer) and self._restarts:
            self._loads[hosted.number] = packet
        return answer

    def _answered(self, hosted: HostedInstance, label: str, packet: Packet, callbacks: Callbacks) -> Outcome:
        with self._turn:
            return self._restarting(
                lambda: self._ensure_created(hosted) or self._child.ask(packet, callbacks),
                f"{label!r} for {hosted.track!r}",
            )

    def abort(self) -> None:
        """Kill the child for good: a call in progress raises ``ModelLost``; safe to call from any thread."""
        self._aborted = True
        self._child.kill()

    def close(self) -> None:
        """End the child; idempotent."""
        self._child.end()

    def _restarting(self, exchange: Callable[[], A], doing: str) -> A:
        """Return what ``exchange`` returns, repeated with a new child whenever one dies."""
        while True:
            try:
                return exchange()
            except Gone as gone:
                found = self._child.whereabouts
                self._restart(f"the process of {self._name!r} ({found}) {gone} while it did {doing}")

    def _ensure_created(self, hosted: HostedInstance) -> Failure | None:
        """Create the instance in this child with the last weights and replay its journal, unless that is done."""
        if hosted.number in self._child.created:
            return None
        packets = [hosted.create, *filter(None, [self._loads.get(hosted.number)])]
        if hosted.journal is not None:
            packets += [pack(Call(hosted.number, work, args)) for work, args in hosted.journal.replay()]
        for packet in packets:
            answer = self._child.ask(packet)
            if isinstance(answer, Failure):
                return answer
        self._child.created.add(hosted.number)
        return None

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
        self._tell(f"{death}: it is started again ({len(self._restart_times)} of {self._restarts})")
        self._child = self._start(self._name, self._setup)
        if self._aborted:  # while the child started
            self._child.kill()
