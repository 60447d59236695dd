"""The journal: what became of every rollout, and what controllers were told of every step, one JSON object a line.

A rollout's lines are ``admitted``, any number of ``deferred``, ``finished``, and ``trained`` or ``dropped``. A step's
line is ``observed``. Lines are in the order in which things happened: what a controller was told comes before
everything it has decided from that, so a journal that ends anywhere explains every decision in it. Only where a run was
killed and resumed do the observations of the steps that were made again come early, before these steps.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias, cast

from oppo.admission import Observation
from oppo.admission.observation import Json
from oppo.events import Chunk, Defer, Finish, Prompt, StepReport

Record: TypeAlias = dict[str, object]

JOURNAL = "journal.jsonl"
"""Where a run directory holds it."""

OBSERVED = "observed"


def entry(step: int, item: object, at: float) -> Record | None:
    """Return the line for something that happened, ``None`` for what the journal leaves out."""
    if isinstance(item, Chunk):  # the most frequent by far
        return None
    if isinstance(item, Prompt):
        return _line(step, at, "admitted", item.rollout, group=item.group, prompt_tokens=len(item.tokens))
    if isinstance(item, Defer):
        return _line(step, at, "deferred", item.rollout, age=item.age)
    if isinstance(item, Finish):
        return _line(step, at, "finished", item.rollout, reason=item.reason, tokens=len(item.response))
    if isinstance(item, Observation):
        return {"step": step, "at": round(at, 6), "event": OBSERVED, "seen": item.as_json()}
    return None


def endings(step: int, report: StepReport, at: float) -> Iterator[Record]:
    """Yield a line for each rollout that ended with this step."""
    for rollout in report.trained:
        yield _line(step, at, "trained", rollout, version=report.version)
    for drop in report.dropped:
        yield _line(step, at, "dropped", drop.rollout, reason=drop.reason)


def story(path: Path, rollout: int) -> list[Record]:
    """Return everything that the journal at ``path`` says of one rollout, in order."""
    return [record for record in read(path) if record.get("rollout") == rollout]


def observations(path: Path, first: int = 0) -> dict[int, Observation]:
    """Return what controllers were told of the steps from ``first`` on, by step, as the journal at ``path`` says."""
    seen = (cast("dict[str, Json]", record["seen"]) for record in read(path) if record["event"] == OBSERVED)
    told = map(Observation.from_json, seen)
    return {each.step: each for each in told if each.step >= first}


def read(path: Path) -> Iterator[Record]:
    """Yield the objects of a file of one a line, up to a line that a kill has torn; none where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as lines:  # a torn line may end within a character
        for line in lines:
            try:
                record: Record = json.loads(line)
            except ValueError:
                return
            yield record


def _line(step: int, at: float, event: str, rollout: int, **more: object) -> Record:
    return {"step": step, "at": round(at, 6), "event": event, "rollout": rollout, **more}
