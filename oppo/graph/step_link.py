"""Steps that are alive together, each linked to the next: a stage waits for the stages of another step."""

from __future__ import annotations

from collections.abc import Sequence

import anyio

from oppo.errors import GraphError


class StepLink:
    """One step among those that are alive: which of its stages have returned, and the links of the steps next to it.

    Args:
        stages: names of the graph's stages.
        before: the link of the step before, if that is alive.
        lookahead: number of later steps that begin before this one has ended, unless the run ends or drains.

    Attributes:
        returned: by stage, set when it returns.
        followed: set once ``after`` is known.
        after: the link of the next step; ``None`` if that begins when this one has ended.
        lookahead: as given.
        over: set once no task of the step is left.
        failed: whether it failed, or was cancelled because an earlier one had.
    """

    def __init__(self, stages: Sequence[str], before: StepLink | None = None, lookahead: int = 0) -> None:
        self.returned = {name: anyio.Event() for name in stages}
        self.followed = anyio.Event()
        self.before = before
        self.after: StepLink | None = None
        self.lookahead = lookahead
        self.over = anyio.Event()
        self.failed = False
        if before is not None:
            before.after = self
            before.followed.set()

    def note_return(self, stage: str) -> None:
        """Note that a stage has returned in this step: in the next it may begin."""
        self.returned[stage].set()

    def fail(self) -> None:
        """Note that the step is over without a result: none follows, and earlier ones wait for none of its stages."""
        self.failed = True
        self.followed.set()
        for event in self.returned.values():
            event.set()

    def end(self) -> None:
        """Note that the step has ended, so that no later one refers to it."""
        if self.after is not None:
            self.after.before = None

    async def previous(self, stages: Sequence[str]) -> None:
        """Wait until the stages have returned in the step before; see :meth:`oppo.graph.Step.previous`."""
        self._require_known(stages)
        before = self.before
        if before is not None:
            await before.all_returned(stages)
            if before.failed:
                await anyio.sleep_forever()  # until the error of that step is raised, which cancels this one

    async def later(self, stages: Sequence[str]) -> None:
        """Wait until the stages have returned in the later steps; see :meth:`oppo.graph.Step.later`."""
        self._require_known(stages)
        link: StepLink = self
        for _ in range(self.lookahead):
            if link.failed:
                await link.all_behind_over()
                return
            await link.followed.wait()
            if link.after is None:
                return
            link = link.after
            await link.all_returned(stages)

    async def all_behind_over(self) -> None:
        """Wait until every step behind this one is over: it has failed, so they are being cancelled."""
        link = self.after
        while link is not None:
            await link.over.wait()
            link = link.after

    async def settled(self, stages: Sequence[str]) -> None:
        """Wait until the stages have returned here and in the later steps; see :meth:`oppo.graph.Step.settled`."""
        self._require_known(stages)
        await self.all_returned(stages)
        await self.later(stages)

    async def all_returned(self, stages: Sequence[str]) -> None:
        """Wait until the stages have returned in this step."""
        for stage in stages:
            await self.returned[stage].wait()

    def _require_known(self, stages: Sequence[str]) -> None:
        for stage in stages:
            if stage not in self.returned:
                known = ", ".join(map(repr, self.returned))
                raise GraphError(f"a stage waits for {stage!r} of another step, but the stages are {known}")
