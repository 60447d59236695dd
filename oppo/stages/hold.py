"""A stage that removes all overlap: scoring begins when decoding has ended."""

from __future__ import annotations

from dataclasses import dataclass

from oppo.events import RolloutEvent, StepReport, merge_chunks
from oppo.graph import Graph, Receiver, Sender


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


def held(graph: Graph[StepReport]) -> Graph[StepReport]:
    """Return the graph with a :class:`Hold` between ``generate`` and its readers."""
    stages = {name: node.stage for name, node in graph.nodes.items()}
    return graph.rebuild(
        held=(Hold(), "generate"),
        ref_logp=(stages["ref_logp"], "held"),
        reward=(stages["reward"], "held"),
        value=(stages["value"], "held"),
        advantage=(stages["advantage"], "held", "reward", {"reference": "ref_logp", "value": "value"}),
    )
