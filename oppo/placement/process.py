"""Work done in a child process, which has an interpreter, and so an interpreter lock, of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Concatenate, Generic, ParamSpec, Self, TypeVar, cast

from oppo import observe
from oppo.errors import ModelLost
from oppo.placement.child import Child, Gone
from oppo.placement.place import Hosted, Journal, reported
from oppo.placement.thread import Thread
from oppo.placement.wire import Answer, Call, Failure, Packet, Settle, pack

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T")


def _silent(sentence: str) -> None:
    del sentence


@dataclass(frozen=True, slots=True, eq=False)
class _Lodger:
    """What the parent keeps of one resident: all that is needed to make it again."""

    number: int
    track: str
    settle: Packet
    journal: Journal | None


class Process:
    """One child process, owned by one model or shared by several that should take turns on the same cores.

    A resident goes there pickled, as it is when it is hosted, and is made there when it is first called. Its methods
    are called in one thread, in the order of the calls; spans are the child's, on the clock that both processes share.
    Errors come back as themselves. The child writes to the parent's output, leaves Ctrl-C to it, and dies with it.

    A child that dies is :class:`~oppo.errors.ModelLost` for the call in progress at once, and for every later one. With
    ``restarts`` it is started again instead: its residents are made again, are told what their journals hold, and the
    call is repeated. What they have in shared memory is still there.

    Args:
        name: shown in traces, errors and the list of processes.
        listener: called, from a thread of this process, with the span of each call.
        setup: called once in the child before anything else, for example
            ``functools.partial(torch.set_num_threads, 1)``; importable by name.
        restarts: how many dead children are replaced.
        tell: told, in a sentence, of each child that is replaced; from another thread.

    Raises:
        ModelError: ``setup`` cannot go to another process.

    Example:
        >>> async def main() -> int:
        ...     with Process("length") as process:
        ...         return await process.host("abc").call("measure", len)
        >>> anyio.run(main)
        3
    """

    def __init__(
        self,
        name: str,
        *,
        listener: observe.SpanListener = observe.ignore,
        setup: Callable[[], object] | None = None,
        restarts: int = 0,
        tell: Callable[[str], None] = _silent,
    ) -> None:
        self.name = name
        self.listener = listener
        self._setup = setup
        self._restarts = restarts
        self._restarted = 0
        self._tell = tell
        self._hosted = 0
        self._open = True
        self._child = Child(name, setup)
        self._thread = Thread(name)

    @property
    def pid(self) -> int:
        """The number of the child process."""
        return self._child.pid

    def host(self, resident: T, *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Give ``resident`` a home in the child.

        Args:
            resident: can be pickled; the one given stays here, for :meth:`Hosted.here`.
            track: of its spans; the name of the place when empty.
            journal: what a resident of a new child is told; without one it begins anew.

        Raises:
            ModelError: it cannot go to another process.
        """
        number = self._hosted
        lodger = _Lodger(number, track or self.name, pack(Settle(number, resident)), journal)
        self._hosted += 1
        return _ProcessResident(self, lodger, resident)

    async def ask(self, lodger: _Lodger, label: str, order: Call) -> object:
        """Return what an order to a resident comes to.

        Raises:
            ModelLost: the place is closed, or its child died once too often.
            Exception: whatever the order came to.
        """
        self._require_open(label)
        packet = pack(order)
        answer = await self._thread.call(label, self._answer, lodger, label, order, packet)
        if isinstance(answer, Failure):
            raise answer.told_of(self.name)
        return answer.value

    async def work_here(self, lodger: _Lodger, label: str, work: Callable[[], R]) -> R:
        """Return what ``work`` returns, done in this process while the child rests.

        Raises:
            ModelLost: the place is closed.
        """
        self._require_open(label)

        def reporting() -> R:
            with reported(self, lodger.track, label):
                return work()

        return await self._thread.call(label, reporting)

    def close(self) -> None:
        """End the child after the call in progress; idempotent."""
        self._open = False
        self._thread.close()
        self._child.end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _require_open(self, label: str) -> None:
        if not self._open:
            raise ModelLost(f"the process of {self.name!r} is closed, so it cannot do {label!r}")

    # From here on: in the thread that talks to the child.

    def _answer(self, lodger: _Lodger, label: str, order: Call, packet: Packet) -> Answer | Failure:
        """Return what an order comes to, in this child or in one that takes its place."""
        while True:
            try:
                answer = self._settled(lodger) or self._child.ask(packet)
            except Gone as gone:
                self._replace(gone, f"{label!r} for {lodger.track!r}")
                continue
            self.listener(observe.Span(lodger.track, label, answer.start, answer.end))
            if isinstance(answer, Answer) and lodger.journal is not None and self._restarts:
                lodger.journal.note(order.work, order.args)
            return answer

    def _settled(self, lodger: _Lodger) -> Failure | None:
        """Make the resident in this child unless it is there, and tell it what its journal holds."""
        if lodger.number in self._child.settled:
            return None
        packets = [lodger.settle]
        if lodger.journal is not None:
            packets += [pack(Call(lodger.number, work, args)) for work, args in lodger.journal.replay()]
        for packet in packets:
            answer = self._child.ask(packet)
            if isinstance(answer, Failure):
                return answer
        self._child.settled.add(lodger.number)
        return None

    def _replace(self, gone: Gone, doing: str) -> None:
        """Start a child in the place of one that is dead.

        Raises:
            ModelLost: that has been done as often as it may.
        """
        lost = f"the process of {self.name!r} (pid {self.pid}) {gone} while it did {doing}"
        if self._restarted == self._restarts:
            again = f", and had been started again {self._restarted} times" if self._restarted else ""
            raise ModelLost(lost + again) from None
        self._restarted += 1
        self._child.end()
        self._tell(f"{lost}: starting it again, {self._restarts - self._restarted} more times at most")
        self._child = Child(self.name, self._setup)


class _ProcessResident(Generic[T]):
    def __init__(self, process: Process, lodger: _Lodger, resident: T) -> None:
        self._process = process
        self._lodger = lodger
        self._resident = resident

    async def call(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        order = Call(self._lodger.number, work, args, kwargs)
        return cast("R", await self._process.ask(self._lodger, label, order))

    async def here(self, label: str, work: Callable[Concatenate[T, P], R], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return await self._process.work_here(self._lodger, label, lambda: work(self._resident, *args, **kwargs))
