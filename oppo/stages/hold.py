"""Stages that hold responses back: until decoding has ended, without any overlap, or until their group is scored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final

from oppo.declared import require_whole
from oppo.errors import ConfigError, GraphError
from oppo.events import Drop, Finish, RolloutEvent, Scored, StepReport, merge_chunks
from oppo.graph import Graph, Receiver, Sender, join
from oppo.graph.topology import Node
from oppo.scorers import SIBLING, BehindPrompt
from oppo.stages.batch import finished_rollout
from oppo.stages.generate import Generate
from oppo.stages.score import Score

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


@dataclass(eq=False)
class Siblings:
    """Sends each response of a group once the group is scored, and with it the first other one that passed.

    It stands between a reward and the :class:`~oppo.stages.Score` of a teacher. The tokens of the sibling, int32 [m],
    are in the column ``sibling`` of the prompt, ``None`` if no other response passed
    (:class:`oppo.scorers.BehindPrompt`). A teacher behind it reads nothing while the group is written.

    Attributes:
        samples: responses to each prompt.
        threshold: a response of at least this score has passed.

    Raises:
        ConfigError: there are fewer than two samples.
    """

    samples: int
    threshold: float = 1.0

    def __post_init__(self) -> None:
        require_whole("samples", self.samples, error=ConfigError)
        if self.samples < 2:
            raise ConfigError(f"samples must be 2 or more, not {self.samples}: a response alone has no sibling")

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        """Report that no teacher is shown what this chooses."""
        del named
        shown = any(isinstance(each, Score) and isinstance(each.scorer, BehindPrompt) for each in stages)
        return [] if shown else ["chooses siblings that no teacher reads: give one an oppo.scorers.BehindPrompt"]

    async def run(
        self, rollout: Receiver[RolloutEvent], score: Receiver[Scored[float] | Drop], /, *, out: Sender[RolloutEvent]
    ) -> None:
        """Send one step's responses, a group at a time; those of groups with drops at the end."""
        groups = defaultdict[int, list[tuple[Finish, float]]](list)
        async for end, scored in join(rollout, score, key=finished_rollout):
            if not isinstance(end, Finish):  # a drop: the key leaves nothing else
                await out.send(end)
                continue
            if isinstance(scored, Drop):
                await out.send(scored)
                continue
            members = groups[end.response.prompt.group]
            members.append((end, float(scored.value)))
            if len(members) == self.samples:
                await self._send(groups.pop(end.response.prompt.group), out)
        for members in groups.values():
            await self._send(members, out)

    async def _send(self, members: list[tuple[Finish, float]], out: Sender[RolloutEvent]) -> None:
        members.sort(key=lambda each: each[0].rollout)
        passed = [finish for finish, score in members if score >= self.threshold]
        for finish, _ in members:
            sibling = next((each.response.tokens for each in passed if each.rollout != finish.rollout), None)
            prompt = finish.response.prompt
            shown = replace(prompt, columns={**prompt.columns, SIBLING: sibling})
            for event in (
                shown,
                *finish.response.pieces(),
                replace(finish, response=replace(finish.response, prompt=shown)),
            ):
                await out.send(event)
