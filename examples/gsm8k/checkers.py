"""Whether an answer to a question of GSM8K is right, by the two rules that results are reported with."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from oppo.rewards import text_of

Said: TypeAlias = str | Sequence[Mapping[str, object]]

NUMBER = r"-?[0-9.,]+"

TAIL = 300
"""Characters at the end of a response in which the strict rule looks for an answer."""


def strict(prompts: Sequence[object], completions: Sequence[Said], answer: Sequence[str]) -> list[float]:
    """Return 1 for each response whose last ``#### NUMBER`` is the answer, commas left out, character by character."""
    del prompts
    return [
        float(_last(rf"#### ({NUMBER})", text[-TAIL:]) == right)
        for text, right in zip(map(text_of, completions), answer, strict=True)
    ]


def flexible(prompts: Sequence[object], completions: Sequence[Said], answer: Sequence[str]) -> list[float]:
    """Return 1 for each response whose last number is the answer, wherever it stands."""
    del prompts
    return [
        float(_last(rf"({NUMBER})", text).rstrip(".") == right)
        for text, right in zip(map(text_of, completions), answer, strict=True)
    ]


def _last(pattern: str, text: str) -> str:
    found = [each for each in re.findall(pattern, text) if re.search(r"\d", each)]
    return found[-1].replace(",", "") if found else ""


both = {"strict": (1.0, strict), "flexible": (0.0, flexible)}
"""The strict rule is the reward; the other is measured beside it, as ``rewards/flexible/mean``."""
