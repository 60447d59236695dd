"""Scorers that are no scorers with priorities, each an error of the type checker on its own line."""

from __future__ import annotations

from collections.abc import Sequence

from oppo.events import Chunk, Finish, Prompt, ToolTokens
from oppo.models import PrioritisedScorer, Scorer
from oppo.scheduling import Priority


class Plain:
    version = 0

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None: ...

    async def finish(self, finished: Sequence[Finish]) -> list[float]:
        return [0.0 for _ in finished]

    async def forget(self, rollouts: Sequence[int]) -> None: ...


class Demanding:
    version = 0

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority) -> None: ...

    async def finish(self, finished: Sequence[Finish], *, priority: Priority) -> list[float]:
        return [0.0 for _ in finished]

    async def forget(self, rollouts: Sequence[int], *, priority: Priority) -> None: ...


plain: PrioritisedScorer[float] = Plain()  # E
demanding: Scorer[float] = Demanding()  # E
