"""A typed graph of async stages, and the engine that runs it step by step; it knows nothing of reinforcement learning.

::

    g = GraphBuilder[Item]("name")          declares stages and wires, which the type checker checks
    graph = g.build(last)                   reports other faults, returns a frozen value
    async with graph.open(items) as run:    enters the stages once
        async for result in run.steps(10):  runs a task for each stage and step, with channels between them

Tasks live for a step: none is left when it ends, by its result, an error or a cancellation. Channels are bounded and
lossless. A stage's error surfaces as itself, with a note that names stage, step and graph.
"""

from __future__ import annotations

from oppo.graph.builder import Graph, GraphBuilder, Stream
from oppo.graph.channel import Channel, ChannelStatistics, Key, Merge, Receiver, Sender, join
from oppo.graph.engine import Snapshot, Wait
from oppo.graph.run import Run
from oppo.graph.stage import AnyStage, Demanding, Observing, Stage1, Stage2, Stage3, Stateful, Step
from oppo.graph.topology import Node

__all__ = [
    "AnyStage",
    "Channel",
    "ChannelStatistics",
    "Demanding",
    "Graph",
    "GraphBuilder",
    "Key",
    "Merge",
    "Node",
    "Observing",
    "Receiver",
    "Run",
    "Sender",
    "Snapshot",
    "Stage1",
    "Stage2",
    "Stage3",
    "Stateful",
    "Step",
    "Stream",
    "Wait",
    "join",
]
