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
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import anyio

from benchmarks.engine import loads

SIZES = (10, 100, 1_000, 10_000)
"""Live rollouts."""
REPEATS = 5
LEAST_CHUNKS = 10_000
"""Least chunks of a repetition; small sizes run more steps for it."""
LEAST_STEPS = 2

Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Load:
    """A load of the engine.

    Attributes:
        title: a description.
        edges: that a chunk travels; its cost is divided by them.
        run: ``run(rollouts, steps)`` yields 0 once it is ready, then the chunks of each step after it.
    """

    title: str
    edges: int
    run: Callable[[int, int], AsyncIterator[int]]


LOADS: Mapping[str, Load] = {
    "edges": Load("send, fan-out, drain, join; nothing waits or merges", loads.EDGES, loads.edges),
    "crowded": Load("the same through full channels: senders in line, chunks merged", loads.EDGES, loads.crowded),
    "step": Load("whole PPO steps with fakes, whose own work counts as well, all edges together", 1, loads.step),
}


@dataclass(frozen=True, slots=True)
class Cost:
    """The cost of a load at one size, by repetition.

    Attributes:
        load: its name in :data:`LOADS`.
        rollouts: live at once.
        chunks: sent in a repetition.
        microseconds: CPU time per chunk and edge.
        collector: the garbage collector's part of it.

    Example:
        >>> Cost("edges", 10, 160, (2.0, 4.0, 3.0), (0.0, 0.5, 0.0)).per_second
        333333
    """

    load: str
    rollouts: int
    chunks: int
    microseconds: tuple[float, ...]
    collector: tuple[float, ...]

    @property
    def median(self) -> float:
        """The median over the repetitions."""
        return statistics.median(self.microseconds)

    @property
    def per_second(self) -> int:
        """Chunks per edge in a second of CPU time, by the median."""
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
            steps = max(LEAST_STEPS, least_chunks // (size * loads.CHUNKS))
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


def show(costs: Sequence[Cost]) -> str:
    head = f"{'load':<8} {'rollouts':>8} {'us/chunk':>9} {'min':>7} {'max':>7} {'of it gc':>9} {'chunks/s':>9}"
    lines = [head, "-" * len(head)]
    lines += [
        f"{cost.load:<8} {cost.rollouts:>8,} {cost.median:>9.2f} {min(cost.microseconds):>7.2f} "
        f"{max(cost.microseconds):>7.2f} {statistics.median(cost.collector):>9.2f} {cost.per_second:>9,}"
        for cost in costs
    ]
    lines += ["", "CPU time of the event loop's thread; median over repetitions. us/chunk is"]
    lines += [f"  {name}: {load.title}{_divided(load)}" for name, load in LOADS.items()]
    return "\n".join(lines)


def _divided(load: Load) -> str:
    return f"; per edge, of {load.edges}" if load.edges > 1 else ""


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
