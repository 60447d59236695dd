"""Children that execute every order together, under supervision; synchronous."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol, cast, runtime_checkable

from oppo.errors import ModelError, ModelLost
from oppo.placement.child import Child, Gone, Setup, Start
from oppo.placement.recipe import kind_of
from oppo.placement.wire import Call, Create, Failure, Outcome, Packet, pack, pack_with_blocks

_GRACE: Final = 2.0
"""Seconds that the other ranks have after one has failed: one of them may report the cause, such as a death."""

_ATTEMPTS: Final = 3


@runtime_checkable
class Member(Protocol):
    """An instance that works in ranks: every rank has a copy of its own, and they exchange what they compute."""

    def join(self, rank: int, size: int, meeting: str) -> None:
        """Meet the other ranks; called once in each, before any other call.

        Args:
            rank: of this copy, from 0 on.
            size: number of ranks.
            meeting: where they meet, as an ``init_method`` of ``torch.distributed.init_process_group``.
        """


class Meeting(Protocol):
    """Where the copies of an instance meet."""

    def of(self, number: int, first: Child) -> str:
        """Return the meeting of an instance, with this child as rank 0: see :meth:`Member.join`.

        Raises:
            Gone: the child is dead.
        """

    def close(self) -> None:
        """Leave nothing behind."""


class FileMeeting:
    """Ranks of one machine meet by a file that no other user may read; implements :class:`Meeting`.

    What an earlier process left when it was killed is removed.
    """

    def __init__(self) -> None:
        prefix = f"oppo-ranks-{os.getuid()}-"
        for left in Path(tempfile.gettempdir()).glob(f"{prefix}*"):
            with suppress(OSError), _locked(left):
                shutil.rmtree(left)
        self._stack = ExitStack()
        for _ in range(_ATTEMPTS):  # another process may take a new one for one that was left
            self._folder = Path(tempfile.mkdtemp(prefix=prefix))
            self._stack.callback(shutil.rmtree, self._folder, ignore_errors=True)
            with suppress(OSError):
                self._stack.enter_context(_locked(self._folder))
                break

    def of(self, number: int, first: Child) -> str:
        """Return a file that is not there yet."""
        del first
        return (self._folder / str(number)).as_uri()

    def close(self) -> None:
        """Remove the files."""
        self._stack.close()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a folder of this user, which the system gives up when the process ends, however it does.

    Raises:
        OSError: another process holds it or has removed it, or it is no folder of this user.
    """
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(held).st_uid != os.getuid():
            raise PermissionError(errno.EACCES, "of another user", str(folder))
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.stat()
        yield
    finally:
        os.close(held)


_LISTENERS: Final[dict[str, socket.socket]] = {}


def listen(address: str) -> str:
    """Listen at a port of one address of this machine; return the meeting, at which rank 0 is in this process."""
    server = socket.create_server((address, 0))
    meeting = f"tcp://{address}:{server.getsockname()[1]}"
    _LISTENERS[meeting] = server
    return meeting


def listener(meeting: str) -> socket.socket | None:
    """Take what :func:`listen` has opened; ``None`` in the ranks but the first."""
    return _LISTENERS.pop(meeting, None)


@dataclass(frozen=True, slots=True, eq=False)
class _RankedInstance:
    """An instance: the orders that create a copy in each rank, and the method by which its copies meet."""

    create: Sequence[Packet]
    join: Callable[..., None]


class RankGroup:
    """The children of a place with ranks.

    An order that fails in every rank is a failure, and the ranks go on. A rank that dies, or fails alone, has left the
    others waiting for it: they are killed, and every later order is ``ModelLost``.

    Args:
        name: of the place.
        starts: a rank is started by each, at least one.
        setup: called once in each child before anything else.
        meeting: of the copies of an instance.
    """

    def __init__(self, name: str, starts: Sequence[Start], setup: Setup, meeting: Meeting) -> None:
        self._name = name
        self._meeting = meeting
        self._children = [start(f"{name} {rank}", setup) for rank, start in enumerate(starts)]
        self._pool = ThreadPoolExecutor(len(starts), thread_name_prefix=f"oppo-{name}-ranks")
        self._instances: list[_RankedInstance] = []
        self._created: set[int] = set()
        self._lost = ""
        self._turn = threading.RLock()

    @property
    def pids(self) -> tuple[int, ...]:
        """The numbers of the child processes, by rank."""
        return tuple(child.pid for child in self._children)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self._children)

    def host(self, instance: object, elsewhere: object = None) -> int:
        """Pickle ``instance`` as it is now; return its number in orders.

        Args:
            elsewhere: what the ranks but the first get, if they cannot get the instance: its recipe.

        Raises:
            ModelError: it is no :class:`Member`, or cannot go to another process.
        """
        kind = kind_of(instance)
        if not issubclass(kind, Member):
            raise ModelError(
                f"{kind.__name__} cannot work in the ranks of {self._name!r}: expected an instance with a "
                "method join(rank, size, meeting), such as a trainer; host it in a Process or a Thread"
            )
        number = len(self._instances)
        first = pack_with_blocks(Create(number, instance))
        others = first if elsewhere is None else pack(Create(number, elsewhere))
        self._instances.append(_RankedInstance([first, *[others] * (len(self._children) - 1)], kind.join))
        return number

    def wait_until_ready(self) -> None:
        """Return when every rank holds every instance.

        Raises:
            ModelLost: a rank is dead, or dies meanwhile.
            Exception: ``setup`` or the unpickling of an instance failed.
        """
        if (failure := self.create()) is not None:
            failure.result(self._name)

    def create(self, number: int | None = None) -> Failure | None:
        """Create an instance in every child, or all of them, and let its copies meet, unless that is done."""
        wanted = range(len(self._instances)) if number is None else (number,)
        with self._turn:
            for each in wanted:
                if each not in self._created:
                    answer = self._create(each)
                    if isinstance(answer, Failure):
                        return answer
                    self._created.add(each)
        return None

    def _create(self, number: int) -> Outcome:
        instance, size = self._instances[number], len(self._children)
        answer = self.ask(instance.create, "'create'")
        if isinstance(answer, Failure):
            return answer
        try:
            meeting = self._meeting.of(number, self._children[0])
        except Gone as gone:
            self._end([], self._death(0, gone))
            raise ModelLost(f"{self._lost} while it did 'join'; the other ranks were ended") from None
        joins = [pack(Call(number, instance.join, (rank, size, meeting))) for rank in range(size)]
        return self.ask(joins, "'join'")

    def ask(self, packets: Sequence[Packet], doing: str) -> Outcome:
        """Give each rank its order; return the answer of rank 0 when all have answered.

        Raises:
            ModelLost: a rank is dead, or dies meanwhile.
        """
        with self._turn:
            if self._lost:
                raise ModelLost(f"{self._lost}, so it cannot do {doing}")
            asked = [self._pool.submit(child.ask, each) for child, each in zip(self._children, packets, strict=True)]
            _wait(asked)
            return self._outcome(asked, doing)

    def _outcome(self, asked: Sequence[Future[Outcome]], doing: str) -> Outcome:
        """Return the answer of rank 0, or a failure; end the ranks if some could wait for others forever."""
        for rank, each in enumerate(asked):
            if each.done() and (gone := each.exception()) is not None:
                self._end(asked, self._death(rank, gone))
                raise ModelLost(f"{self._lost} while it did {doing}; the other ranks were ended") from None
        failures = {rank: each.result() for rank, each in enumerate(asked) if each.done() and _failed(each)}
        if failures and len(failures) < len(asked):
            rank, failure = next(iter(failures.items()))
            self._end(asked, f"rank {rank} of {self._name!r} failed alone")
            cast("Failure", failure).error.add_note(f"{self._lost} while it did {doing}; the other ranks were ended")
            return failure
        return asked[0].result()

    def abort(self) -> None:
        """Kill the children for good; an order in progress raises ``ModelLost``; safe to call from any thread."""
        self._lost = self._lost or f"the ranks of {self._name!r} were killed"
        for child in self._children:
            child.kill()

    def close(self) -> None:
        """End the children; idempotent."""
        for child in self._children:
            child.end()
        self._pool.shutdown()
        self._meeting.close()

    def _death(self, rank: int, gone: BaseException) -> str:
        return f"rank {rank} of {self._name!r} ({self._children[rank].whereabouts}) {gone}"

    def _end(self, asked: Sequence[Future[Outcome]], why: str) -> None:
        self._lost = self._lost or why
        for child in self._children:
            child.kill()
        wait(asked)


def _wait(asked: Sequence[Future[Outcome]]) -> None:
    """Wait for all ranks, but no longer than :data:`_GRACE` for the others once one has died or failed."""
    pending, patience = set(asked), None
    while pending:
        done, pending = wait(pending, patience, FIRST_COMPLETED)
        if not done:
            return
        if any(each.exception() is not None or _failed(each) for each in done):
            patience = _GRACE


def _failed(asked: Future[Outcome]) -> bool:
    return isinstance(asked.result(), Failure)
