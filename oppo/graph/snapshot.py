"""The state of a running step, for people: which stages work, which wait for which, how full every channel is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

Want: TypeAlias = Literal["an item", "room"]


@dataclass(frozen=True, slots=True)
class Wait:
    """A stage that waits for another: for an item from it, or for room in the channel to it."""

    stage: str
    awaited: str
    want: Want


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The stages of one step at one moment; safe to take from any thread.

    Attributes:
        step: number of the step, from 1.
        running: the stages that have not returned.
        waits: a stage may wait for several others, or wait in one task while it works in another.
        channels: the counters of each, by ``source->target``.
        table: the channels as lines for people.

    Example:
        >>> waits = (Wait("advantage", "reward", "an item"),)
        >>> print(Snapshot(0, ("reward", "advantage"), waits, {}, "").sentence())
        advantage waits for reward; reward is at work
    """

    step: int
    running: tuple[str, ...]
    waits: tuple[Wait, ...]
    channels: Mapping[str, Mapping[str, int]]
    table: str

    @property
    def working(self) -> Sequence[str]:
        """The stages that have not returned and wait for no other."""
        waiting = {wait.stage for wait in self.waits}
        return [stage for stage in self.running if stage not in waiting]

    def doing(self, stage: str) -> str:
        """Return ``at work``, ``waits for ...``, or an empty string once the stage has returned."""
        if stage not in self.running:
            return ""
        waits = [wait for wait in self.waits if wait.stage == stage]
        if not waits:
            return "at work"
        items = [wait.awaited for wait in waits if wait.want == "an item"]
        full = [f"{wait.awaited} to make room" for wait in waits if wait.want == "room"]
        return f"waits for {', '.join([*items, *full])}"

    def sentence(self) -> str:
        """Return, on one line, which stages wait for which and which are at work."""
        waiting = [f"{stage} {self.doing(stage)}" for stage in self.running if stage not in self.working]
        return "; ".join([*waiting, *(f"{stage} is at work" for stage in self.working)])
