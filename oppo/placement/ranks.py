"""Calls that several child processes, the ranks, make together, each on its own copy of the instance.

An order goes to every rank, and rank 0 answers. An order that fails in every rank is a failure, and the ranks go on. A
rank that dies, or fails alone, has left the others waiting for it: they are killed, and every later order finds them
dead.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, Protocol, TypeAlias, cast, runtime_checkable

from oppo.atomic_files import temporary
from oppo.declared import require_whole
from oppo.errors import ModelError, ProtocolError
from oppo.log import with_route
from oppo.placement.child import Call, Callbacks, Outcome, Packet, pack
from oppo.placement.place import Make
from oppo.placement.process import Child, ChildProcess, Gone, Process, Setup, Start

_GRACE: Final = 2.0
"""Seconds that the other ranks have after one has failed: one of them may report the cause, such as a death."""

_ENDED: Final = "; the other ranks were ended"


@runtime_checkable
class Member(Protocol):
    """An instance that works in ranks: every rank has a copy of its own, and they exchange what they compute."""

    def join(self, rank: int, size: int, meeting: str) -> None:
        """Meet the other ranks; called once in each, before any other call.

        Args:
            rank: of this copy, from 0 on.
            size: number of ranks.
            meeting: an ``init_method`` of ``torch.distributed.init_process_group``.
        """


Meet: TypeAlias = Callable[[int, Child], str]
"""Returns where the copies of an instance, by its number, meet: see :meth:`Member.join`. The child is rank 0."""


def _file(folder: Path, number: int, first: Child) -> str:
    del first
    return (folder / str(number)).as_uri()


_LISTENERS: Final[dict[str, socket.socket]] = {}


def listen(address: str) -> str:
    server = socket.create_server((address, 0))
    meeting = f"tcp://{address}:{server.getsockname()[1]}"
    _LISTENERS[meeting] = server
    return meeting


def listener(meeting: str) -> socket.socket | None:
    """Take what :func:`listen` has opened; ``None`` in the ranks but the first."""
    return _LISTENERS.pop(meeting, None)


class RankedChild(Child):
    """The ranks as one child; each is started by one of ``starts``; ``close`` is called in the end."""

    def __init__(
        self, starts: Sequence[Start], meet: Meet, close: Callable[[], object], name: str, setup: Setup
    ) -> None:
        super().__init__()
        self._name = name
        self._meet = meet
        self._close = close
        try:
            self._ranks = [start(f"{name} {rank}", setup) for rank, start in enumerate(starts)]
        except BaseException:
            close()
            raise
        self._pool = ThreadPoolExecutor(len(starts), thread_name_prefix=f"oppo-{name}-ranks")
        self._lost: Gone | None = None

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(pid for rank in self._ranks for pid in rank.pids)

    def orders(self, number: int, make: Make[object]) -> Sequence[Packet]:
        packed = {type(rank): rank.orders(number, make) for rank in {type(rank): rank for rank in self._ranks}.values()}
        return [packet for rank in self._ranks for packet in packed[type(rank)]]

    def create(self, number: int, orders: Sequence[Packet]) -> Outcome:
        answer = self._ask_each(orders)
        if answer.error is not None:
            return answer
        try:
            meeting = self._meet(number, self._ranks[0])
        except Gone as gone:
            raise self._end([], self._death(0, gone)) from None
        size = len(self._ranks)
        return self._ask_each([pack(Call(number, _join, (self._name, rank, size, meeting))) for rank in range(size)])

    def ask(self, packet: Packet, callbacks: Callbacks | None = None) -> Outcome:
        if callbacks:
            raise ProtocolError(f"the ranks of {self._name!r} cannot call back: expected a Process or a Thread")
        return self._ask_each([packet] * len(self._ranks))

    def _ask_each(self, packets: Sequence[Packet]) -> Outcome:
        # The ranks end if some could wait for others forever.
        if self._lost is not None:
            raise self._lost
        asked = [self._pool.submit(with_route(rank.ask), each) for rank, each in zip(self._ranks, packets, strict=True)]
        _wait(asked)
        for rank, each in enumerate(asked):
            if each.done() and (gone := each.exception()) is not None:
                raise self._end(asked, self._death(rank, gone)) from None
        failures = {rank: each.result() for rank, each in enumerate(asked) if each.done() and _failed(each)}
        if failures and len(failures) < len(asked):
            rank, failure = next(iter(failures.items()))
            alone = self._end(asked, Gone("failed alone", who=f"rank {rank} of {self._name!r}", sequel=_ENDED))
            cast("BaseException", failure.error).add_note(f"{alone.who} {alone}{alone.sequel}")
            return failure
        return asked[0].result()

    def end(self) -> None:
        for rank in self._ranks:
            rank.end()
        self._pool.shutdown()
        self._close()

    def kill(self) -> None:
        self._lost = self._lost or Gone("were killed by this process", who=f"the ranks of {self._name!r}")
        for rank in self._ranks:
            rank.kill()

    def _death(self, rank: int, gone: BaseException) -> Gone:
        return Gone(str(gone), who=f"rank {rank} of {self._name!r} ({self._ranks[rank].whereabouts})", sequel=_ENDED)

    def _end(self, asked: Sequence[Future[Outcome]], why: Gone) -> Gone:
        self._lost = self._lost or why
        self.kill()
        wait(asked)
        return self._lost


def _join(instance: object, name: str, rank: int, size: int, meeting: str) -> None:
    if not isinstance(instance, Member):
        raise ModelError(
            f"{type(instance).__name__} cannot work in the ranks of {name!r}: expected an instance with a method "
            "join(rank, size, meeting), such as a trainer; host it in a Process or a Thread"
        )
    instance.join(rank, size, meeting)


def _wait(asked: Sequence[Future[Outcome]]) -> None:
    # Once one has died or failed, the others are waited for no longer than ``_GRACE``.
    pending, patience = set(asked), None
    while pending:
        done, pending = wait(pending, patience, FIRST_COMPLETED)
        if not done:
            return
        if any(each.exception() is not None or _failed(each) for each in done):
            patience = _GRACE


def _failed(asked: Future[Outcome]) -> bool:
    return asked.result().error is not None


class Ranks(Process):
    """Several child processes, the ranks, for an instance that shares its work out among its copies.

    Each rank makes the instance at its first call, and the copies meet (:class:`~oppo.placement.Member`). All ranks
    make every call, with the same arguments; its result, error and span come from rank 0. The ranks ignore
    Ctrl-C and die with their parent.

    A rank that dies, or fails alone, ends the others, which would wait for it forever: the call in progress and every
    later one raise :class:`~oppo.errors.ModelLost`. An error of all ranks leaves the place as it is.

    Args:
        name: see :class:`Place`.
        count: of ranks, at least 1.
        setup: called once in each rank before anything else; importable by name.

    Example:
        >>> with Ranks("trainer", 2) as ranks:  # doctest: +SKIP
        ...     trainer = hf.HfTrainer(actor, critic, sampling=sampling, place=ranks)
    """

    what = "group of ranks"

    def __init__(self, name: str, count: int, *, setup: Setup = None) -> None:
        require_whole("ranks", count, 1)
        stack = ExitStack()
        folder = stack.enter_context(temporary("ranks"))  # its files can be read by no other user
        start = partial(RankedChild, [ChildProcess] * count, partial(_file, folder), stack.close)
        super().__init__(name, setup=setup, start=start)
