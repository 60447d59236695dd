"""Loads for measuring the engine's own cost. Each yields 0 once it is ready to begin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, TypeAlias

import anyio
import anyio.lowlevel
import numpy as np

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.events import Chunk, Finish, FloatArray, Prompt, Response, Scored, merge_chunks, rollout_of
from oppo.graph import Graph, GraphBuilder, Receiver, Sender, join
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer

CHUNKS = 8
"""Chunks in a response, on average."""

TOKEN: Final = (np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))
"""A token, its log-prob and its version, made once."""

EDGES = 3
"""Readers of the chunks in :func:`edges` and :func:`crowded`."""

Event: TypeAlias = Prompt | Chunk | Finish


def story(rollout: int) -> Sequence[Event]:
    """Return the events of a rollout, from its prompt to its end."""
    prompt = Prompt(rollout, rollout, TOKEN[0])
    chunks = [Chunk(rollout, start, *TOKEN) for start in range(CHUNKS)]
    return [prompt, *chunks, Finish(rollout, Response.empty(prompt), "eos")]


@dataclass(eq=False)
class Replay:
    """Sends prepared events of ``rollouts`` live rollouts as decode steps do: one chunk of each in turn."""

    rollouts: int
    _steps: Sequence[Sequence[Event]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._steps = list(zip(*(story(rollout) for rollout in range(self.rollouts)), strict=True))

    async def run(self, ticks: Receiver[int], /, *, out: Sender[Event]) -> None:
        """Send one step's events, when the source ticks."""
        async for _ in ticks:
            for events in self._steps:
                for event in events:
                    await out.send(event)
                await anyio.lowlevel.checkpoint()
            break


@dataclass(eq=False)
class ReplayEach:
    """Sends prepared events of ``rollouts`` live rollouts, each from a task of its own that may wait for room."""

    rollouts: int
    _stories: Sequence[Sequence[Event]] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._stories = [story(rollout) for rollout in range(self.rollouts)]

    async def run(self, ticks: Receiver[int], /, *, out: Sender[Event]) -> None:
        """Send one step's events, when the source ticks."""
        async for _ in ticks:
            async with anyio.create_task_group() as senders:
                for events in self._stories:
                    senders.start_soon(self._send, events, out)
            break

    async def _send(self, events: Sequence[Event], out: Sender[Event]) -> None:
        for event in events:
            await out.send(event)
            await anyio.lowlevel.checkpoint()


@dataclass(eq=False)
class Listen:
    """Drains its channel, as :class:`oppo.stages.Score` does, counts tokens, and answers each ``Finish``."""

    tokens: int = 0

    async def run(self, rollout: Receiver[Event], /, *, out: Sender[Scored[float]]) -> None:
        """Read one step's events."""
        while events := await rollout.drain():
            for event in events:
                if isinstance(event, Chunk):
                    self.tokens += len(event.tokens)
                elif isinstance(event, Finish):
                    await out.send(Scored(event.rollout, 0.0, 0))
            await anyio.lowlevel.checkpoint()


@dataclass(eq=False)
class Align:
    """Joins the three answers to each rollout, and sends their number."""

    async def run(
        self,
        a: Receiver[Scored[float]],
        b: Receiver[Scored[float]],
        c: Receiver[Scored[float]],
        /,
        *,
        out: Sender[int],
    ) -> None:
        """Count one step's rows."""
        await out.send(len([row async for row in join(a, b, c, key=rollout_of)]))


def fan(source: Replay | ReplayEach, builder: GraphBuilder[int]) -> Graph[int]:
    """Return a graph of ``source``, three readers of its chunks, and the join of their answers."""
    rollout = builder.add("generate", source, builder.prompts)
    a, b, c = (builder.add(name, Listen(), rollout) for name in ("a", "b", "c"))
    return builder.build(builder.add("join", Align(), a, b, c))


async def edges(rollouts: int, steps: int) -> AsyncIterator[int]:
    """Yield the chunks of each step through channels that never fill: send, fan-out, drain, join; no merging."""
    graph = fan(Replay(rollouts), GraphBuilder[int]("edges", capacity=4 * rollouts))
    async with graph.open(count()) as run:
        yield 0
        async for _ in run.steps(steps):
            yield rollouts * CHUNKS


async def crowded(rollouts: int, steps: int) -> AsyncIterator[int]:
    """Yield the chunks of each step through full channels: senders wait in line, chunks are merged."""
    builder = GraphBuilder[int]("crowded", capacity=max(4, rollouts // 4), merge=merge_chunks, key=rollout_of)
    async with fan(ReplayEach(rollouts), builder).open(count()) as run:
        yield 0
        async for _ in run.steps(steps):
            yield rollouts * CHUNKS


def length(prompt: Prompt) -> int:
    """Return the chunks of a response: :data:`CHUNKS` on average, from half of it to one and a half."""
    return CHUNKS // 2 + (prompt.rollout * 7) % (CHUNKS + 1)


def _zeros(event: Finish, _read: tuple[int, ...], _version: int) -> FloatArray:
    return np.zeros(len(event.response), np.float32)


async def step(rollouts: int, steps: int) -> AsyncIterator[int]:
    """Yield the chunks of each step of :func:`oppo.ppo`, with an eighth overcommitted."""
    extra = rollouts // 9
    policy = FakePolicy(length, seconds=0.0)
    graph = ppo(
        policy=policy,
        reference=FakeScorer(_zeros),
        reward=FakeScorer(lambda event, read, version: 0.0),
        critic=FakeScorer(_zeros),
        trainer=FakeTrainer(),
        admission=Overcommit(rollouts - extra, extra),
        chunks=Fixed(1),
    )
    prompts = (Prompt(n, n, TOKEN[0], group=n) for n in count())
    async with graph.open(prompts) as run:
        made = 0
        yield made
        async for _ in run.steps(steps):
            yield policy.tokens - made
            made = policy.tokens
