"""The engine's own cost: CPU time per chunk, from ten rollouts in flight to ten thousand, with fakes for models.

Costs are CPU seconds of the event loop's thread (``time.thread_time``), without other programs: the engine computes in
no other thread, and these loads never wait. The garbage collector stays on, as in a run, and collects before each
repetition. Its part of the cost is shown, since it grows with all objects alive. Repetitions of all loads and sizes are
interleaved.
"""

from __future__ import annotations

import gc
import platform
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Final, Literal, TypeAlias

import anyio
import anyio.lowlevel
import numpy as np

from benchmarks.harness import aligned
from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.events import Chunk, Finish, FloatArray, Prompt, Response, Scored, merge_chunks, rollout_of
from oppo.graph import Graph, GraphBuilder, Receiver, Sender, join
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer

CHUNKS = 8  # chunks in a response, on average

# A token, its log-prob and its version, made once
TOKEN: Final = (np.ones(1, np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32))

EDGES = 3  # readers of the chunks in `edges` and `crowded`

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


SIZES = (10, 100, 1_000, 10_000)  # live rollouts
REPEATS = 5
LEAST_CHUNKS = 10_000  # least chunks of a repetition; small sizes run more steps for it
LEAST_STEPS = 2

Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Load:
    title: str  # a description
    edges: int  # that a chunk travels; its cost is divided by them
    # `run(rollouts, steps)` yields 0 once it is ready, then the chunks of each step after it
    run: Callable[[int, int], AsyncIterator[int]]


LOADS: Mapping[str, Load] = {
    "edges": Load("send, fan-out, drain, join; nothing waits or merges", EDGES, edges),
    "crowded": Load("the same through full channels: senders in line, chunks merged", EDGES, crowded),
    "step": Load("whole PPO steps with fakes, whose own work counts as well, all edges together", 1, step),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a load at one size, by repetition.

    Example:
        >>> Cost("edges", 10, 160, (2.0, 4.0, 3.0), (0.0, 0.5, 0.0)).per_second
        333333
    """

    load: str  # its name in `LOADS`
    rollouts: int  # live at once
    chunks: int  # sent in a repetition
    microseconds: tuple[float, ...]  # CPU time per chunk and edge
    collector: tuple[float, ...]  # the garbage collector's part of it

    @property
    def median(self) -> float:
        return statistics.median(self.microseconds)

    @property
    def per_second(self) -> int:
        return round(1e6 / self.median)


@dataclass(slots=True)
class _Sample:
    chunks: int = 0
    seconds: float = 0.0
    collecting: float = 0.0


def measure(
    sizes: Sequence[int] = SIZES,
    repeats: int = REPEATS,
    *,
    least_chunks: int = LEAST_CHUNKS,
    clock: Clock = time.thread_time,
) -> tuple[Cost, ...]:
    """Return the cost of every load at every size, by a clock of CPU seconds; takes a minute or two."""
    cases = [(name, size) for name in LOADS for size in sizes]
    samples: dict[tuple[str, int], list[_Sample]] = {case: [] for case in cases}
    for name in LOADS:
        anyio.run(_sample, LOADS[name], 10, LEAST_STEPS, clock)  # warm-up
    for _ in range(repeats):
        for name, size in cases:
            steps = max(LEAST_STEPS, least_chunks // (size * CHUNKS))
            samples[name, size].append(anyio.run(_sample, LOADS[name], size, steps, clock))
    return tuple(_cost(name, size, taken) for (name, size), taken in samples.items())


async def _sample(load: Load, rollouts: int, steps: int, clock: Clock) -> _Sample:
    sample, began = _Sample(), 0.0

    def on_collection(phase: Literal["start", "stop"], info: Mapping[str, int]) -> None:
        nonlocal began
        del info
        if phase == "start":
            began = clock()
        else:
            sample.collecting += clock() - began

    running = load.run(rollouts, steps)
    await anext(running)
    gc.collect()
    gc.callbacks.append(on_collection)
    try:
        start = clock()
        async for chunks in running:
            sample.chunks += chunks
        sample.seconds = clock() - start
    finally:
        gc.callbacks.remove(on_collection)
    return sample


def _cost(name: str, size: int, samples: Sequence[_Sample]) -> Cost:
    per_edge = 1e6 / LOADS[name].edges
    return Cost(
        load=name,
        rollouts=size,
        chunks=samples[0].chunks,
        microseconds=tuple(per_edge * sample.seconds / sample.chunks for sample in samples),
        collector=tuple(per_edge * sample.collecting / sample.chunks for sample in samples),
    )


def live(sizes: Sequence[int] = (1_000, 10_000), steps: int = 3, *, clock: Clock = time.thread_time) -> str:
    """Return, on a line, the CPU time of whole PPO steps with fakes for each live rollout, by the number of these."""
    parts = []
    for size in sizes:
        sample = anyio.run(_sample, LOADS["step"], size, steps, clock)
        milliseconds, collecting = 1e3 * sample.seconds / size / steps, sample.collecting / sample.seconds
        parts.append(f"{size:,} live rollouts, {milliseconds:.2f} ms for each in a step, {collecting:.0%} of it gc")
    return f"engine, CPU time with fakes: {'; '.join(parts)}"


def show(costs: Sequence[Cost]) -> str:
    rows = [["load", "rollouts", "us/chunk", "min", "max", "of it gc", "chunks/s"]]
    for cost in costs:
        figures = (cost.median, min(cost.microseconds), max(cost.microseconds), statistics.median(cost.collector))
        microseconds = [f"{figure:.2f}" for figure in figures]
        rows.append([cost.load, f"{cost.rollouts:,}", *microseconds, f"{cost.per_second:,}"])
    lines = [aligned(rows), "", "CPU time of the event loop's thread; median over repetitions. us/chunk is"]
    for name, load in LOADS.items():
        divided = f"; per edge, of {load.edges}" if load.edges > 1 else ""
        lines.append(f"  {name}: {load.title}{divided}")
    return "\n".join(lines)


def as_json(costs: Sequence[Cost]) -> Mapping[str, object]:
    return {
        "clock": "time.thread_time of the event loop's thread",
        "unit": "microseconds of CPU time per chunk and edge",
        "garbage_collector": "on; collected before each repetition",
        "python": platform.python_version(),
        "machine": platform.machine(),
        "loads": {name: {"title": load.title, "edges": load.edges} for name, load in LOADS.items()},
        "costs": [
            {
                "load": cost.load,
                "rollouts": cost.rollouts,
                "chunks": cost.chunks,
                "median": cost.median,
                "min": min(cost.microseconds),
                "max": max(cost.microseconds),
                "collector": statistics.median(cost.collector),
                "per_second": cost.per_second,
            }
            for cost in costs
        ],
    }


if __name__ == "__main__":
    sys.stdout.write(f"{live()}\n")
