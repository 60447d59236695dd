"""One round of decoding in a step: the rollouts it began with, and those that join in the place of completed ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio

from oppo.events import Prompt
from oppo.models import Decoding
from oppo.stages.in_flight import InFlightRollout
from oppo.stages.ledger import Ledger
from oppo.stages.metrics import DecodeMeter

Groups: TypeAlias = Sequence[tuple[Prompt, ...]]
"""The rollouts of some units, by their prompts."""


@dataclass(eq=False)
class DecodingRound:
    """The rollouts of one decoding.

    Attributes:
        engine: decodes them.
        meter: measures them.
        read: starts to read a rollout, in a task of its own.
    """

    engine: Decoding
    meter: DecodeMeter
    read: Callable[[InFlightRollout], None]
    _news: anyio.Event = field(default_factory=anyio.Event, init=False, repr=False)

    def begin(self, rollouts: Sequence[InFlightRollout]) -> None:
        """Read rollouts that are decoded."""
        for rollout in rollouts:
            self.read(rollout)

    def note_end(self, rollout: InFlightRollout) -> None:
        """Note that a rollout was read to its end, or to the cut."""
        self.meter.note_end(rollout)
        self._news.set()

    async def refill(
        self,
        ledger: Ledger,
        remaining: int,
        take: Callable[[int], Awaitable[Groups]],
        open_: Callable[[Groups], Awaitable[Sequence[InFlightRollout]]],
    ) -> None:
        """Let units join until the step is cut, or no more can: the prompts or the remaining steps do not reach.

        What was read of the prompts by the time of the cut is carried, unwritten: reading them is not cancelled, since
        that would end an async generator.

        Args:
            ledger: decides how many join.
            remaining: steps left to train in, this one included.
            take: reads so many prompts, or those that are left; may wait for them.
            open_: opens the rollouts of units.
        """
        while not ledger.is_cut():
            self._news = anyio.Event()
            wanted = ledger.refill(remaining)
            groups = await take(wanted)
            if groups:
                ledger.add(groups)
                joining = await open_(groups)
                self.meter.add(joining)
                await self.engine.add([rollout.decode for rollout in joining])
                self.begin(joining)
            if len(groups) < wanted or not ledger.decoding:
                return
            if not wanted:
                await self._news.wait()
