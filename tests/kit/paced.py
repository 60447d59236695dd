"""Calls of tools that are answered by events: a step ends while rollouts are in the middle of their second call."""

from __future__ import annotations

from collections import Counter
from contextvars import ContextVar
from dataclasses import dataclass, field

import anyio

turn: ContextVar[tuple[int, int]] = ContextVar("turn")
"""The row and the number of the turn that makes a call."""


@dataclass
class Calls:
    """Those of a run whose rows come in the order of their numbers, two in a batch and one beyond it.

    Rows 0 and 1 are answered once row 2 makes its second call, which is answered in the next step: when row 3 calls.

    Attributes:
        samples: rollouts of a row.
        waiting: turns whose calls are unanswered.
    """

    samples: int = 1
    waiting: list[tuple[int, int]] = field(default_factory=list)
    _made: Counter[tuple[int, int]] = field(default_factory=Counter)
    _news: anyio.Event = field(default_factory=anyio.Event)

    async def pace(self) -> None:
        """Wait until the call may be answered."""
        row, number = at = turn.get()
        self._made[at] += 1
        self._news.set()
        self._news = anyio.Event()
        self.waiting.append(at)
        after = {0: (2, 1), 1: (2, 1), 2: (3, 0)}.get(row) if (row, number) != (2, 0) else None
        while after is not None and self._made[after] < self.samples:
            await self._news.wait()
        self.waiting.remove(at)


calls = Calls()
"""Those of the present run."""
