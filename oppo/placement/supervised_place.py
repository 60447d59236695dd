"""Places of one supervised child, wherever it runs."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from oppo import observe
from oppo.placement.answered_place import AnsweredPlace
from oppo.placement.callback import Callbacks
from oppo.placement.place import Hosted, Journal
from oppo.placement.recipe import Recipe
from oppo.placement.supervised_process import HostedInstance, SupervisedProcess
from oppo.placement.wire import Call, pack, pack_with_blocks
from oppo.scheduling import DEFAULT_TIME_SLICE, Priority, TimeSlice

T = TypeVar("T")


class SupervisedPlace(AnsweredPlace):
    """A place of one child, which makes the calls of its instances.

    Args:
        name, listener, time_slice: see :class:`Place`.
        child: from now on this place's.
    """

    def __init__(
        self,
        name: str,
        child: SupervisedProcess,
        *,
        listener: observe.SpanListener = observe.silent,
        time_slice: TimeSlice = DEFAULT_TIME_SLICE,
    ) -> None:
        super().__init__(name, listener=listener, time_slice=time_slice)
        self._child = child

    @property
    def pid(self) -> int:
        """The number of the child process, on its machine."""
        return self._child.pid

    @abstractmethod
    def host(self, instance: T | Recipe[T], *, track: str = "", journal: Journal | None = None) -> Hosted[T]:
        """Host ``instance`` in the child.

        Args:
            instance: can be pickled.
            track: of its spans; the name of the place when empty.
            journal: replayed after a restart; without one the instance restarts as it was hosted.

        Raises:
            ModelError: it cannot go to another process.
        """

    def wait_until_ready(self) -> None:
        """Return when the child holds every instance; see :meth:`AnsweredPlace.wait_until_ready`."""
        self._child.wait_until_ready()

    async def call_in_child(self, priority: Priority, hosted: HostedInstance, label: str, call: Call) -> object:
        """Return what a call returns in the child.

        Raises:
            ModelLost: the place is closed, or its child died once too often.
            Preempted: the call is preemptible and was not made.
            ProtocolError: the call has callbacks, and a restart would repeat it.
            Exception: whatever the call raised.
        """
        callbacks = Callbacks()
        stubbed = callbacks.extract(call)
        packet = pack_with_blocks(stubbed) if callbacks else pack(stubbed)
        return await self.answered(
            priority, hosted.track, label, lambda: self._child.call(hosted, label, stubbed, packet, callbacks)
        )

    def abort(self) -> None:
        """Kill the child, whatever it is doing: the call in progress and every later one raise ``ModelLost``."""
        self._child.abort()

    def end(self) -> None:
        """End the child; idempotent."""
        self._child.close()
