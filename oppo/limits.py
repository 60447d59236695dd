"""Limits of a turn, which a request may set below those of its response."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class TurnLimit:
    """Where a turn ends that has not ended by itself, in tokens of the turn.

    Attributes:
        tokens: of the turn at most; 0: as many as its response has room for.
        thinking: the turn is interrupted after so many tokens if it is thinking then; 0: never.
        opening: the token that begins thinking; -1: the prompt has begun it.
        closing: the token that ends it.
    """

    tokens: int = 0
    thinking: int = 0
    opening: int = -1
    closing: int = -1

    def reached(self, tokens: Sequence[int], length: int) -> bool:
        """Return whether a turn of ``length`` tokens, the last ones of ``tokens``, ends here or is interrupted."""
        return length > 0 and (length == self.tokens or (length == self.thinking and self.interrupts(tokens[-length:])))

    def interrupts(self, turn: Sequence[int]) -> bool:
        thinks = self.closing not in turn and (self.opening < 0 or self.opening in turn)
        return len(turn) == self.thinking > 0 and thinks


UNLIMITED: Final = TurnLimit()
