"""The child's side of a process place: take an order, carry it out, answer, until the other end is closed."""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from typing import NoReturn

from oppo import observe
from oppo.errors import ModelError
from oppo.placement.callback import Refusal, Reply, Request, Stub
from oppo.placement.wire import Answer, Call, Create, Failure, Packet, pack, receive, send, unpack


def serve(fd: int) -> None:
    """Answer the orders that come over the socket ``fd``, in this thread; when its other end is closed, leave.

    Ctrl-C is the parent's business. A parent that dies takes this process with it, whatever is being done here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(fd, False)
    threading.Thread(target=_end_with_the_parent, args=(fd,), name="oppo-lifeline", daemon=True).start()
    connection: Connection[bytes, bytes] = Connection(fd)
    instances: dict[int, object] = {}
    with suppress(EOFError, ConnectionError):
        while True:
            answer = _answered(receive(connection), instances, Requests(connection))
            if answer is not None:
                sys.stdout.flush()
                send(connection, answer)
    _leave()


class CallbackFailedError(Exception):
    """A callback has failed in the parent, which raises its error; here it ends the call."""


class Requests:
    """What the work of one call asks of its parent.

    Args:
        connection: to the parent.
    """

    def __init__(self, connection: Connection[bytes, bytes]) -> None:
        self._connection = connection
        self._replies = select.poll()
        self._replies.register(connection, select.POLLIN)
        self._refused = False

    def bind(self, argument: object) -> object:
        """Return, for the stub of a callback, what requests it when it is called; any other argument as it is."""
        return partial(self._request, argument) if isinstance(argument, Stub) else argument

    def _request(self, stub: Stub, /, *args: object, **kwargs: object) -> object:
        """Return what the callback returned; nothing, and at once, for one that is one-way.

        Raises:
            CallbackFailedError: a callback of this call has failed.
        """
        if not self._refused:
            send(self._connection, pack(Request(stub, args, kwargs)))
            if stub.oneway and not self._replies.poll(0):
                return None
            reply = unpack(receive(self._connection))
            if isinstance(reply, Reply):
                return reply.value
            self._refused = True
        raise CallbackFailedError


def search(path: Sequence[str]) -> None:
    """Look for modules where the parent does."""
    sys.path[:] = path


def _end_with_the_parent(fd: int) -> None:
    lifeline = select.poll()
    lifeline.register(fd, 0)  # of nothing but a hang-up is told
    lifeline.poll()
    _leave()


def _leave() -> NoReturn:
    """End at once: there is nothing to save, and taking an interpreter with torch down in good order takes seconds."""
    os._exit(0)


def _answered(packet: Packet, instances: dict[int, object], requests: Requests) -> Packet | None:
    """Return the answer to an order; ``None`` for a refusal that came when its call was over."""
    start = observe.now()
    try:
        order = unpack(packet)
        if isinstance(order, Refusal):
            return None
        if not isinstance(order, Call | Create):
            raise ModelError(f"expected an order, but {type(order).__name__} came")  # noqa: TRY301 - it is answered too
        value = order.carry_out(instances, requests.bind)
        return pack(Answer(start, observe.now(), value))
    except Exception as error:  # noqa: BLE001 - the boundary to the parent, which raises it
        return _failed(error, start)


def _failed(error: Exception, start: float) -> Packet:
    """Return the error as an answer; as a :class:`ModelError` with its words where it cannot cross as itself."""
    report = "".join(traceback.format_exception(error))
    end = observe.now()
    try:
        packet = pack(Failure(start, end, error, report))
        unpack(packet)
    except Exception:  # noqa: BLE001 - errors of other libraries pickle and unpickle as they please
        return pack(Failure(start, end, ModelError(f"{type(error).__name__}: {error}\n{report}".rstrip()), report))
    return packet
