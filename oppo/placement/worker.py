"""The child's side: execute an order, answer, and so on until the parent closes the socket."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from types import FrameType
from typing import NoReturn, TextIO, cast

from oppo import observe
from oppo.errors import ModelError
from oppo.placement.wire import Call, Outcome, Packet, Reply, Request, Stub, pack, receive, send, unpack
from oppo.redact import HarmlessStream


def die_with(lifeline: int) -> None:
    """Kill this process when the last process that could write to the pipe ``lifeline`` has closed it or is dead."""
    # On Linux the system itself sends the signal, so code that holds the interpreter lock dies too. PR_SET_PDEATHSIG
    # would not do: it follows the thread that started this process, which may end long before its process.
    hang_up = select.poll()
    hang_up.register(lifeline, 0)  # reports a hang-up only
    if sys.platform != "linux":
        threading.Thread(target=_exit_after, args=(hang_up,), name="oppo-lifeline", daemon=True).start()
        return
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC)
    if hang_up.poll(0):  # it came before there was an owner to kill
        exit_at_once()


def exit_at_once() -> NoReturn:
    # There is nothing to save, and an orderly shutdown with torch loaded takes seconds.
    os._exit(0)


def _exit_after(hang_up: select.poll) -> None:
    hang_up.poll()
    exit_at_once()


class OverdueError(BaseException):
    """Ends a call that takes longer than its caller waits; not an ``Exception``, so that few handlers catch it."""


_calls = 0
"""Calls in progress in this process."""


def heed_interrupts() -> None:
    """Let SIGUSR1 end the call in progress, by an :class:`OverdueError` in its thread, the main one."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        del number, frame
        if _calls:
            raise OverdueError

    signal.signal(signal.SIGUSR1, interrupt)


class CallbackFailedError(Exception):
    """A callback failed in the parent, which raises its error; this one ends the call in the child."""


class Caller(ABC):
    """The way of a call to its caller, for its callbacks."""

    def __init__(self) -> None:
        self._failed = False

    @abstractmethod
    def send(self, request: Packet) -> None:
        """Send a request, without waiting for its reply."""

    @abstractmethod
    def receive(self) -> Packet:
        """Return the next reply; wait for it."""

    @abstractmethod
    def has_come(self) -> bool:
        """Return whether a reply is there."""

    def bind(self, argument: object) -> object:
        return partial(self._request, argument) if isinstance(argument, Stub) else argument

    def _request(self, stub: Stub, /, *args: object, **kwargs: object) -> object:
        if not self._failed:
            self.send(pack(Request(stub, args, kwargs)))
            if stub.oneway and not self.has_come():
                return None
            reply = cast("Reply", unpack(self.receive()))
            if not reply.failed:
                return reply.value
            self._failed = True
        raise CallbackFailedError


class _SocketCaller(Caller):
    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        super().__init__()
        self._connection = connection
        self._replies = select.poll()  # many times as fast as the connection's own poll()
        self._replies.register(connection, select.POLLIN)

    def send(self, request: Packet) -> None:
        send(self._connection, request)

    def receive(self) -> Packet:
        return receive(self._connection)

    def has_come(self) -> bool:
        return bool(self._replies.poll(0))


def serve(fd: int, lifeline: int) -> None:
    """Answer the orders that come over the socket ``fd`` until the parent closes it, and exit."""
    # Ctrl-C is left to the parent. What user code prints here is shown without secrets and control characters.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    os.set_inheritable(lifeline, False)
    die_with(lifeline)
    sys.stdout, sys.stderr = cast("TextIO", HarmlessStream(sys.stdout)), cast("TextIO", HarmlessStream(sys.stderr))
    connection: Connection[bytes, bytes] = Connection(fd)
    instances: dict[int, object] = {}
    with suppress(EOFError, ConnectionError):
        while True:
            answered = answer(receive(connection), instances, _SocketCaller(connection))
            if answered is not None:
                sys.stdout.flush()
                send(connection, answered)
    exit_at_once()


def answer(
    packet: Packet, instances: dict[int, object], caller: Caller, *, seal: Callable[[object], Packet] = pack
) -> Packet | None:
    """Execute an order and return its outcome; none to a reply for a callback of a call that is over."""
    start = observe.now()
    try:
        order = unpack(packet)
        if isinstance(order, Reply):
            return None
        value = _execute(cast("Call", order), instances, caller)
        return seal(Outcome(start, observe.now(), value))
    except Exception as error:  # noqa: BLE001 - the boundary to the parent, which raises it
        return _failure(error, start)


def _execute(call: Call, instances: dict[int, object], caller: Caller) -> object:
    first = () if call.instance is None else (instances[call.instance],)
    kwargs = {name: caller.bind(value) for name, value in call.kwargs.items()}
    with _in_progress():
        value = call.work(*first, *map(caller.bind, call.args), **kwargs)
    if call.makes is None:
        return value
    instances[call.makes] = value
    return None


@contextmanager
def _in_progress() -> Iterator[None]:
    global _calls  # noqa: PLW0603 - a signal handler reads it
    _calls += 1
    try:
        yield
    except OverdueError as error:
        raise TimeoutError("interrupted, since it took too long") from error
    finally:
        _calls -= 1


def _failure(error: Exception, start: float) -> Packet:
    report = "".join(traceback.format_exception(error))
    end = observe.now()
    try:
        packet = pack(Outcome(start, end, error=error, report=report))
        unpack(packet)
    except Exception:  # noqa: BLE001 - errors of other libraries pickle and unpickle as they please
        told = ModelError(f"{type(error).__name__}: {error}\n{report}".rstrip())
        return pack(Outcome(start, end, error=told, report=report))
    return packet
