"""Places of one supervised child, wherever it runs."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from oppo.placement.answered_place import AnsweredPlace
from oppo.placement.callback import Callbacks
from oppo.placement.place import Hosted, Journal
from oppo.placement.recipe import Recipe
from oppo.placement.supervised_process import HostedInstance, SupervisedProcess
from oppo.placement.wire import Call, pack, pack_with_blocks
from oppo.scheduling import Priority

T = TypeVar("T")


class SupervisedPlace(AnsweredPlace[SupervisedProcess]):
    """A place of one child, which makes the calls of its instances."""

    @property
    def pid(self) -> int:
        """The number of the child process, on its machine."""
        return self._children.pid

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
            priority, hosted.track, label, lambda: self._children.call(hosted, label, stubbed, packet, callbacks)
        )
