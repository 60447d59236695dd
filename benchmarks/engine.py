"""The engine's own cost: CPU time of whole PPO steps for each live rollout, with fakes for models.

Costs are CPU seconds of the event loop's thread (``time.thread_time``), without other programs: the engine computes in
no other thread, and these steps never wait. The garbage collector stays on, as in a run. Its part of the cost is shown,
since it grows with all objects alive.
"""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Literal

import anyio
import numpy as np

from oppo.admission import Overcommit
from oppo.admission.chunking import Fixed
from oppo.algorithms.ppo import ppo
from oppo.events import Finish, FloatArray, Prompt
from oppo.testing import FakePolicy, FakeScorer, FakeTrainer

CHUNKS = 8  # of a token, in a response, on average


def length(prompt: Prompt) -> int:
    """Return the chunks of a response: :data:`CHUNKS` on average, from half of it to one and a half."""
    return CHUNKS // 2 + (prompt.rollout * 7) % (CHUNKS + 1)


def _zeros(event: Finish, _read: tuple[int, ...], _version: int) -> FloatArray:
    return np.zeros(len(event.response), np.float32)


async def cost(rollouts: int, steps: int, clock: Callable[[], float]) -> tuple[float, float]:
    """Return the seconds of steps of :func:`oppo.ppo`, an eighth overcommitted, and those of the garbage collector."""
    extra = rollouts // 9
    graph = ppo(
        policy=FakePolicy(length, seconds=0.0),
        reference=FakeScorer(_zeros),
        reward=FakeScorer(lambda event, read, version: 0.0),
        critic=FakeScorer(_zeros),
        trainer=FakeTrainer(),
        admission=Overcommit(rollouts - extra, extra),
        chunks=Fixed(1),
    )
    token = np.ones(1, np.int32)
    async with graph.open(Prompt(n, n, token, group=n) for n in count()) as run:
        gc.collect()
        with _collections(clock) as collecting:
            start = clock()
            async for _ in run.steps(steps):
                pass
            return clock() - start, sum(collecting)


@contextmanager
def _collections(clock: Callable[[], float]) -> Iterator[list[float]]:
    took, began = list[float](), 0.0

    def on_collection(phase: Literal["start", "stop"], info: Mapping[str, int]) -> None:
        nonlocal began
        del info
        if phase == "start":
            began = clock()
        else:
            took.append(clock() - began)

    gc.callbacks.append(on_collection)
    try:
        yield took
    finally:
        gc.callbacks.remove(on_collection)


def live(
    sizes: Sequence[int] = (1_000, 10_000), steps: int = 3, *, clock: Callable[[], float] = time.thread_time
) -> str:
    """Return, on a line, the CPU time of a step for each live rollout, by the number of these."""
    parts = []
    for size in sizes:
        seconds, collecting = anyio.run(cost, size, steps, clock)
        parts.append(
            f"{size:,} live rollouts, {1e3 * seconds / size / steps:.2f} ms for each in a step, "
            f"{collecting / seconds:.0%} of it gc"
        )
    return f"engine, CPU time with fakes: {'; '.join(parts)}"


if __name__ == "__main__":
    sys.stdout.write(f"{live()}\n")
