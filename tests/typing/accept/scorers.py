"""Scorers that users write: without the keyword `priority`, with it, and with a time slice."""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_type

from oppo.events import Chunk, Finish, Prompt, ToolTokens
from oppo.models import PrioritisedScorer, Scorer
from oppo.scheduling import IN_ORDER, Priority, TimeSlice
from oppo.scorers import ScorerCapabilities
from oppo.stages import Score


class Plain:
    version = 0

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens]) -> None: ...

    async def finish(self, finished: Sequence[Finish]) -> list[float]:
        return [0.0 for _ in finished]

    async def forget(self, rollouts: Sequence[int]) -> None: ...


class Shared:
    version = 0
    capabilities = ScorerCapabilities(time_slice=TimeSlice(seconds=0.1))

    async def extend(self, events: Sequence[Prompt | Chunk | ToolTokens], *, priority: Priority = IN_ORDER) -> None: ...

    async def finish(self, finished: Sequence[Finish], *, priority: Priority = IN_ORDER) -> list[float]:
        return [0.0 for _ in finished]

    async def forget(self, rollouts: Sequence[int], *, priority: Priority = IN_ORDER) -> None: ...


plain: Scorer[float] = Plain()
shared: PrioritisedScorer[float] = Shared()
as_scorer: Scorer[float] = shared
assert_type(Score[float](plain), Score[float])
assert_type(Score[float](shared), Score[float])
