"""A stage that removes all overlap: scoring begins when decoding has ended."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

from oppo.errors import GraphError
from oppo.events import RolloutEvent, StepReport, merge_chunks
from oppo.graph import Graph, Receiver, Sender
from oppo.graph.topology import Node
from oppo.stages.generate import Generate

HELD: Final = "held"  # the name of the stage that holds, in a graph of `held`


@dataclass(eq=False)
class Hold:
    """Holds a step's events until decoding has ended, then sends them, adjacent chunks of a rollout merged."""

    async def run(self, rollout: Receiver[RolloutEvent], /, *, out: Sender[RolloutEvent]) -> None:
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


def held(graph: Graph[StepReport], readers: Collection[str] | None = None) -> Graph[StepReport]:
    """Return a graph without overlap: ``readers``, or all, read the generated events through a :class:`Hold`."""
    generating = [node for node in graph.nodes.values() if isinstance(node.stage, Generate)]
    if len(generating) != 1:
        names = ", ".join(repr(node.name) for node in generating) or "none"
        raise GraphError(f"graph {graph.name!r} cannot be held: expected one stage that is a Generate, got {names}")
    (node,) = generating
    if isinstance(node.stage, Generate) and node.stage.select is not None:
        raise GraphError(
            f"graph {graph.name!r} cannot be held: its DynamicSampling asks for scores while {node.name!r} decodes, "
            "and they would wait for the end of decoding; select nothing (select=None, "
            "algorithm.dynamic_sampling = false)"
        )
    if HELD in graph.nodes:
        raise GraphError(f"graph {graph.name!r} cannot be held: a stage is called {HELD!r} already")
    nodes = [
        _reading_held(each, node.name) if readers is None or each.name in readers else each
        for each in graph.topology.nodes
    ]
    nodes.append(Node(HELD, Hold(), (node.name,)))
    return Graph(replace(graph.topology, nodes=tuple(nodes)))


def _reading_held(node: Node, generating: str) -> Node:
    def instead(name: str) -> str:
        return HELD if name == generating else name

    named = {keyword: instead(name) for keyword, name in node.named.items()}
    return replace(node, inputs=tuple(map(instead, node.inputs)), named=named)
