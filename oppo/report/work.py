"""How long each model was at work in a step, by what it did: a line of ``work.jsonl``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

from oppo.observe import Span

Work: TypeAlias = dict[str, dict[str, list[float]]]
"""By model and label of the work: the number of calls, and their seconds."""


def work_of(spans: Iterable[Span]) -> Work:
    """Return the work in the spans of models; that of evaluations, which is no part of a step, is left out.

    Example:
        >>> work_of([Span("reward", "extend", 0.0, 0.5), Span("reward", "extend", 1.0, 1.25)])
        {'reward': {'extend': [2, 0.75]}}
    """
    found: Work = {}
    for span in (span for span in spans if span.role != "evaluate"):
        calls = found.setdefault(span.track, {}).setdefault(span.label, [0, 0.0])
        calls[0] += 1
        calls[1] = round(calls[1] + span.end - span.start, 6)
    return found
