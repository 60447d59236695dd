"""A stage that puts an end to all overlap: what is decoded is scored when nothing is decoded any more."""

from __future__ import annotations

from dataclasses import dataclass

from oppo.events import Chunk, RolloutEvent, StepReport
from oppo.graph import Graph, Receiver, Sender


@dataclass(eq=False)
class Hold:
    """Keeps a step's events until decoding has ended, then passes them on, chunks of a rollout as one."""

    async def run(self, rollout: Receiver[RolloutEvent], /, *, out: Sender[RolloutEvent]) -> None:
        """Pass on one step's events."""
        held: list[RolloutEvent] = []
        newest: dict[int, int] = {}  # place of the newest event of each rollout
        async for event in rollout:
            at = newest.get(event.rollout)
            last = held[at] if at is not None else None
            if at is not None and isinstance(last, Chunk) and isinstance(event, Chunk):
                held[at] = last.merge(event)
            else:
                newest[event.rollout] = len(held)
                held.append(event)
        for event in held:
            await out.send(event)


def held(graph: Graph[StepReport]) -> Graph[StepReport]:
    """Return the same graph with a :class:`Hold` between generation and everybody who reads it."""
    stages = {name: node.stage for name, node in graph.nodes.items()}
    return graph.rebuild(
        held=(Hold(), "generate"),
        ref_logp=(stages["ref_logp"], "held"),
        reward=(stages["reward"], "held"),
        value=(stages["value"], "held"),
        advantage=(stages["advantage"], "held", "ref_logp", "reward", "value"),
    )
