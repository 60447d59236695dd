"""The reward of answers that are known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from oppo.rewards import text_of


def right(completions: Sequence[Any], answer: Sequence[str]) -> list[float]:
    """Return 1 for each completion that is the answer."""
    return [float(text_of(said) == known) for said, known in zip(completions, answer, strict=True)]
