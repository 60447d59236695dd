"""A child process of this machine, and the socket to it: a dead child is noticed at once."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, Pipe
from typing import cast

from oppo.placement import worker
from oppo.placement.callback import Callbacks, Request
from oppo.placement.child import Child, Gone, Setup
from oppo.placement.wire import Call, Failure, Outcome, Packet, pack_with_blocks, receive, send, unpack

_PROGRAM = (
    "import sys; name, fd, lifeline, *sys.path = sys.argv[1:]; "
    "from oppo.placement.worker import serve; serve(int(fd), int(lifeline))"
)
"""The child runs this program, not the parent's: no script or notebook of a user runs twice."""

_GRACE = 5.0
"""Seconds until a child whose socket is closed at either end is killed."""


class ChildProcess(Child):
    """A process of this machine that searches for modules where this one does, ignores Ctrl-C and dies with it.

    The constructor starts the process without waiting for it; its first orders run while the parent goes on.

    Args:
        name: shown in the list of processes.
        setup: called once in the child before anything else.
    """

    def __init__(self, name: str, setup: Setup) -> None:
        super().__init__()
        first = [Call(None, worker.search, ([str(folder) for folder in sys.path],))]
        first += [] if setup is None else [Call(None, setup)]
        packets = [pack_with_blocks(order) for order in first]
        ours, theirs = socket.socketpair()
        lifeline, self._lifeline = Pipe(duplex=False)
        with theirs, lifeline, _interrupts_blocked():
            # The program is this package's own; the interpreter is the one that runs.
            self._process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-c", _PROGRAM, name, *map(str, (theirs.fileno(), lifeline.fileno(), *sys.path))],
                stdin=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), lifeline.fileno()),
            )
        self._connection: Connection[bytes, bytes] = Connection(ours.detach())
        self._unanswered = 0
        with suppress(Gone):  # the first order raises it again
            for packet in packets:
                self._send(packet)
                self._unanswered += 1

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self._process.pid

    def ask(self, packet: Packet, callbacks: Callbacks | None = None) -> Outcome:
        """Send an order and return its answer; see :meth:`Child.ask`."""
        while self._unanswered:
            answer = self._answer(Callbacks())
            self._unanswered -= 1
            if isinstance(answer, Failure):
                return answer
        self._send(packet)
        return self._answer(callbacks or Callbacks())

    def _answer(self, callbacks: Callbacks) -> Outcome:
        """Run the callbacks that are requested, then return the answer, or the error of a callback instead."""
        while isinstance(message := self._receive(), Request):
            if (reply := callbacks.run(message)) is not None:
                self._send(reply)
        answer = cast("Outcome", message)
        return answer if callbacks.error is None else Failure(answer.start, answer.end, callbacks.error)

    def end(self) -> None:
        """Close the socket and the lifeline, upon which the child exits or is killed; idempotent."""
        self._connection.close()
        self._lifeline.close()
        self._reap()

    def kill(self) -> None:
        """Kill the child, whatever it is doing; a thread that waits for an answer gets :class:`Gone`."""
        self._process.kill()
        self._process.wait()

    def interrupt(self) -> None:
        """End the call in progress, if the child's setup was :func:`oppo.placement.worker.heed_interrupts`."""
        self._process.send_signal(signal.SIGUSR1)

    def _send(self, packet: Packet) -> None:
        try:
            send(self._connection, packet)
        except OSError:
            raise Gone(self._death()) from None

    def _receive(self) -> object:
        try:
            packet = receive(self._connection)
        except (EOFError, OSError):
            raise Gone(self._death()) from None
        return unpack(packet)

    def _reap(self) -> int:
        try:
            return self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def _death(self) -> str:
        code = self._reap()
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        hint = " (as the system does when memory runs out)" if -code == signal.SIGKILL else ""
        return f"was killed by {name}{hint}"


@contextmanager
def _interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread; a child started meanwhile inherits that, and ignores it from its first moment."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
