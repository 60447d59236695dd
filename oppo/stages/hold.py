"""A stage that removes all overlap: scoring begins when decoding has ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, cast

from oppo.events import RolloutEvent, StepReport, merge_chunks
from oppo.graph import AnyStage, Graph, Receiver, Sender

Wiring: TypeAlias = tuple[AnyStage, *tuple[str | Mapping[str, str], ...]]
"""A stage and what it reads, as :meth:`Graph.rebuild` takes them."""


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
    """Return the graph with a :class:`Hold` between ``generate`` and all its readers."""

    def wired(name: str) -> str:
        return "held" if name == "generate" else name

    readers: dict[str, Wiring] = {}
    for node in graph.nodes.values():
        if "generate" in node.reads:
            named = {keyword: wired(name) for keyword, name in node.named.items()}
            readers[node.name] = cast("Wiring", (node.stage, named, *map(wired, node.inputs)))
    return graph.rebuild(without=(), held=(Hold(), "generate"), **readers)
