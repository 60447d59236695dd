"""How many tokens travel in one chunk. A chunk is a unit of transport: the cut does not wait for its end."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Protocol

from oppo.admission.observation import Observation


class ChunkSize(Protocol):
    """Decides the size of the chunks; pure and synchronous."""

    def size(self) -> int:
        """Tokens in a chunk, at least 1; asked at the start of a step."""

    def observe(self, seen: Observation) -> None:
        """Learn from a step that is over."""


@dataclass(frozen=True, slots=True)
class Fixed:
    """Chunks of ``tokens`` tokens."""

    tokens: int = 32

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ValueError(f"a chunk holds at least 1 token, not {self.tokens}")

    def size(self) -> int:
        """Return the fixed size."""
        return self.tokens

    def observe(self, seen: Observation) -> None:
        """Learn nothing."""


@dataclass(frozen=True, slots=True)
class WholeRollout:
    """One chunk for each response: scoring begins when the response is complete. The honest baseline."""

    def size(self) -> int:
        """Return more tokens than any response has."""
        return sys.maxsize

    def observe(self, seen: Observation) -> None:
        """Learn nothing."""
