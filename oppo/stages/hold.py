"""A stage that removes all overlap: scoring begins when decoding has ended."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oppo.events import RolloutEvent, StepReport, merge_chunks
from oppo.graph import Graph, Receiver, Sender
from oppo.graph.stage import AnyStage


@dataclass(eq=False)
class Hold:
    """Holds a step's events until decoding has ended, then sends them, adjacent chunks of a rollout merged."""

    async def run(self, rollout: Receiver[RolloutEvent], /, *, out: Sender[RolloutEvent]) -> None:
        """Send one step's events."""
        held: list[RolloutEvent] = []
        newest: dict[int, int] = {}  # index of the newest event of each rollout
        async for event in rollout:
            index = newest.get(event.rollout, len(held))
            merged = merge_chunks(held[index], event) if index < len(held) else None
            if merged is None:
                newest[event.rollout] = len(held)
                held.append(event)
            else:
                held[index] = merged
        for event in held:
            await out.send(event)


def held(graph: Graph[StepReport], scorers: Sequence[str] = ("ref_logp", "reward", "value")) -> Graph[StepReport]:
    """Return the graph with a :class:`Hold` between ``generate`` and these stages and the advantages'."""
    stages = {name: node.stage for name, node in graph.nodes.items()}
    waiting: dict[str, tuple[AnyStage, str]] = {name: (stages[name], "held") for name in scorers}
    return graph.rebuild(
        without=(),
        held=(Hold(), "generate"),
        **waiting,
        advantage=(stages["advantage"], "held", "reward", {"reference": "ref_logp", "value": "value"}),
    )
