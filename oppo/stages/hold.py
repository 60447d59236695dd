"""Stages that hold responses back: until decoding has ended, without any overlap, or until their group is scored."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from annotated_types import Ge

from oppo.declared import Threshold, validated
from oppo.errors import ConfigError, GraphError
from oppo.events import Batch, Drop, Finish, FloatArray, RolloutEvent, Scored, StepReport, merge_chunks
from oppo.graph import Graph, Receiver, Sender, join
from oppo.graph.topology import Node
from oppo.returns import FixedKL
from oppo.scorers import SIBLING, BehindPrompt, Lesson
from oppo.stages.advantage import GroupRelative
from oppo.stages.batch import BatchPart, ScoredRollout, ScoredRollouts, finished_rollout
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
@validated(ConfigError)
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
    threshold: Threshold = 1.0

    def __post_init__(self) -> None:
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


@dataclass(eq=False)
@validated(ConfigError)
class InParts:
    """Sends each group of a step as a :class:`~oppo.stages.batch.BatchPart` once all of its responses are scored.

    The trainer accumulates its gradient while others are still being written. The step's batch follows, as the
    estimator makes it, and holds the same rows. Parts come in an order that depends on timing, and so does the sum of
    their gradients, by rounding.

    Attributes:
        estimator: compares the responses of a group.
        samples: responses to each prompt.

    Raises:
        ConfigError: the advantages of a group depend on the rest of the batch: the estimator is another one, scores are
            normalised by the moments of all, or the KL coefficient adapts.
    """

    estimator: GroupRelative
    samples: Annotated[int, Ge(2)]

    def __post_init__(self) -> None:
        if not isinstance(self.estimator, GroupRelative):
            raise ConfigError(
                f"{type(self.estimator).__name__} estimates advantages from the whole batch, so no group can be "
                "trained before: expected a GroupRelative, as in RLOO, GRPO and Dr. GRPO"
            )
        if self.estimator.advantage in {"batch_standardised", "each_reward"} or hasattr(self.estimator, "baselines"):
            raise ConfigError("scores compared over the batch cannot come in parts: compare them in a group")
        if self.estimator.shaping.norm:
            raise ConfigError("scores normalised by the moments of all cannot come in parts: leave norm out")
        if not isinstance(self.estimator.control, FixedKL):
            raise ConfigError("a KL coefficient that adapts to each batch cannot come in parts: give a number")

    async def run(
        self,
        rollout: Receiver[RolloutEvent],
        score: Receiver[Scored[float] | Drop],
        /,
        *,
        out: Sender[Batch | BatchPart],
        reference: Receiver[Scored[FloatArray] | Drop] | None = None,
        value: Receiver[Scored[FloatArray] | Drop] | None = None,
        proximal: Receiver[Scored[FloatArray] | Drop] | None = None,
        teacher: Receiver[Scored[Lesson] | Drop] | None = None,
    ) -> None:
        """Send groups as they are complete, then the step's batch; send nothing without a rollout."""
        groups = defaultdict[int, list[ScoredRollout]](list)

        async def send_complete(each: ScoredRollout) -> None:
            # A group with branches waits for the batch: a rollout of which a part was accumulated would begin anew.
            members = groups[each.group]
            members.append(each)
            branched = any(member.finish.response.prompt.branch for member in members)
            if len(members) == self.samples and not branched and (part := self._early(members)).sampled.any():
                await out.send(BatchPart(part))

        scored = await ScoredRollouts.of(
            rollout,
            score,
            each=send_complete,
            reference=reference,
            values=value,
            proximal=proximal,
            teacher=teacher,
        )
        if scored:
            await out.send(self.estimator.batch_of(scored))

    def _early(self, members: Sequence[ScoredRollout]) -> Batch:
        return copy.copy(self.estimator).batch(sorted(members, key=lambda each: each.rollout))

    def faults(self, stages: Sequence[object], named: Collection[str], /) -> Sequence[str]:
        return self.estimator.faults(stages, named)

    def state_dict(self) -> Mapping[str, Any]:
        return self.estimator.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.estimator.load_state_dict(state)
