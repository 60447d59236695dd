"""A taskset of verifiers: sums of two numbers, written as its documentation has it. Nothing here is of oppo."""

from __future__ import annotations

import random
from collections.abc import Iterator

import verifiers.v1 as vf


class SumData(vf.TaskData):
    """A question, and its answer."""

    answer: str


class SumTask(vf.Task[SumData]):
    """Right is worth 1, brief a tenth."""

    @vf.reward(weight=1.0)
    async def right(self, trace: vf.Trace) -> float:
        """Whether the last reply has the sum."""
        return float(self.data.answer in trace.last_reply)

    @vf.reward(weight=0.1)
    async def brief(self, trace: vf.Trace) -> float:
        """One for a reply of one word, less for each more."""
        return 1 / max(1, len(trace.last_reply.split()))


class SumsConfig(vf.TasksetConfig):
    """How many there are."""

    num_tasks: int = 256


class SumsTaskset(vf.Taskset[SumTask, SumsConfig]):
    """The same sums each time."""

    def load(self) -> Iterator[SumTask]:
        """Yield the tasks."""
        rng = random.Random(0)  # noqa: S311 - questions, not secrets
        for _ in range(self.config.num_tasks):
            left, right = rng.randrange(100), rng.randrange(100)
            yield SumTask(SumData(prompt=f"What is {left} + {right}?", answer=str(left + right)), self.config.task)


__all__ = ["SumsTaskset"]
