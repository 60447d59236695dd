"""The journal: what became of every rollout, one JSON object a line.

A rollout's lines are ``admitted``, any number of ``deferred``, ``finished``, and ``trained`` or ``dropped``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from oppo.events import Chunk, Defer, Finish, Prompt, StepReport

Record: TypeAlias = dict[str, object]


def entry(step: int, item: object, at: float) -> Record | None:
    """Return the line for an event of a rollout, ``None`` for an event that the journal leaves out."""
    if isinstance(item, Chunk):  # the most frequent by far
        return None
    if isinstance(item, Prompt):
        return _line(step, at, "admitted", item.rollout, group=item.group, prompt_tokens=len(item.tokens))
    if isinstance(item, Defer):
        return _line(step, at, "deferred", item.rollout, age=item.age)
    if isinstance(item, Finish):
        return _line(step, at, "finished", item.rollout, reason=item.reason, tokens=len(item.response))
    return None


def endings(step: int, report: StepReport, at: float) -> Iterator[Record]:
    """Yield a line for each rollout that ended with this step."""
    for rollout in report.trained:
        yield _line(step, at, "trained", rollout, version=report.version)
    for drop in report.dropped:
        yield _line(step, at, "dropped", drop.rollout, reason=drop.reason)


def story(path: Path, rollout: int) -> list[Record]:
    """Return everything that the journal at ``path`` says of one rollout, in order."""
    with path.open(encoding="utf-8") as lines:
        records: Iterator[Record] = (json.loads(line) for line in lines)
        return [record for record in records if record["rollout"] == rollout]


def _line(step: int, at: float, event: str, rollout: int, **more: object) -> Record:
    return {"step": step, "at": round(at, 6), "event": event, "rollout": rollout, **more}
