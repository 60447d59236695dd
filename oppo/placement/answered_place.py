"""Places whose instances answer from elsewhere, while a thread of this process waits for each answer."""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, Generic, ParamSpec, Protocol, TypeVar

from oppo import observe
from oppo.placement.place import Place
from oppo.placement.thread import Thread
from oppo.placement.wire import Outcome
from oppo.scheduling import DEFAULT_TIME_SLICE, Priority, TimeSlice

P = ParamSpec("P")
R = TypeVar("R")


class ChildProcesses(Protocol):
    """One or more child processes, wherever they run."""

    def wait_until_ready(self) -> None:
        """Return when the children hold every instance.

        Raises:
            ModelLost: a child died once too often.
            Exception: ``setup`` or the unpickling of an instance failed.
        """

    def abort(self) -> None:
        """Kill the children, whatever they are doing: the call in progress and later ones raise ``ModelLost``."""

    def close(self) -> None:
        """End the children, which have no call in progress; idempotent."""


C = TypeVar("C", bound=ChildProcesses)


class AnsweredPlace(Place, Generic[C]):
    """A place of one or more child processes; calls there, and local ones, are made one at a time.

    Args:
        name, listener, time_slice: see :class:`Place`.
        children: from now on this place's.

    Attributes:
        what: the children, in the error of a closed place.
    """

    what: ClassVar[str]

    def __init__(
        self,
        name: str,
        children: C,
        *,
        listener: observe.SpanListener = observe.silent,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
    ) -> None:
        super().__init__(name, listener=listener, time_slice=time_slice)
        self._children = children
        self._thread = Thread(name)

    def wait_until_ready(self) -> None:
        """Return when the children hold every instance; without this, each is unpickled at its first call.

        Raises:
            ModelLost: a child died once too often.
            Exception: ``setup`` or the unpickling of an instance failed.
        """
        self._children.wait_until_ready()

    def abort(self) -> None:
        """Kill the children, whatever they are doing: the call in progress and later ones raise ``ModelLost``."""
        self._children.abort()

    async def answered(self, priority: Priority, track: str, label: str, ask: Callable[[], Outcome]) -> object:
        """Return the result of what ``ask`` returns, called in this place's thread; its span is on ``track``.

        Raises:
            ModelLost: the place is closed, or ``ask`` raised it.
            Preempted: the call is preemptible and was not made.
            Exception: the outcome is a failure.
        """
        context = observe.work_context()

        def answer() -> object:
            self.at_work = f"{track}: {label}"
            try:
                outcome = ask()
            finally:
                self.at_work = ""
            self.listener(context.span(track, label, outcome.start, outcome.end))
            return outcome.result(self.name)

        return await self._in_turn(priority, label, answer)

    async def call_at(
        self, priority: Priority, track: str, label: str, work: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Run ``work`` in this process while the children are idle; see :meth:`Place.call_at`."""
        context = observe.work_context()

        def run() -> R:
            with self._reported(track, label, context):
                return work(*args, **kwargs)

        return await self._in_turn(priority, label, run)

    async def _in_turn(self, priority: Priority, label: str, work: Callable[[], R]) -> R:
        self._require_open(f"{self.what} of", label)
        return await self._thread.call_at(priority, self.name, label, work)

    def close(self) -> None:
        """End the children after the call in progress; idempotent."""
        super().close()
        self._thread.close()
        self._children.close()
