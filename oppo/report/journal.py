"""The journal: the events of every rollout and the controllers' observation of every step, one JSON object a line.

A rollout's lines are ``admitted``, any number of ``answered`` (a turn, by its environment) and ``deferred``,
``finished``, and ``trained`` or ``dropped``. A step's line is ``observed``, with a line ``round`` before it for each
round in which its groups were selected. Where a signal ended a run with steps in flight, ``drained`` names the last of
them: no later one began before it had ended, which is part of what the run computed. Lines are in order of time: an
observation comes before every decision made from it, so a journal that ends anywhere explains every decision in it.
Only in a resumed run do the observations of repeated steps come before these steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import cast

from oppo.admission import Observation
from oppo.admission.observation import Json
from oppo.events import Chunk, Defer, Finish, Prompt, StepReport
from oppo.redact import redacted
from oppo.report.records import DRAINED, OBSERVED, Record, read
from oppo.stages.selection import Rounds
from oppo.turns import Answered

JOURNAL = "journal.jsonl"
"""The journal of a run directory."""


def entry(step: int, item: object, at: float) -> Record | None:
    """Return the line for an item, ``None`` for items that the journal leaves out."""
    if isinstance(item, Chunk):  # the most frequent by far
        return None
    if isinstance(item, Prompt):
        return _line(step, at, "admitted", item.rollout, group=item.group, prompt_tokens=len(item.tokens))
    if isinstance(item, Defer):
        return _line(step, at, "deferred", item.rollout, age=item.age)
    if isinstance(item, Finish):
        return _line(step, at, "finished", item.rollout, reason=item.reason, tokens=len(item.response))
    if isinstance(item, Answered):
        facts = {"turn": item.turn, "tokens": item.tokens, "seconds": round(item.seconds, 6)}
        error = {"error": redacted(item.error)} if item.error else {}
        return _line(step, at, "answered", item.rollout, **facts, **error)
    if isinstance(item, Observation):
        return {"step": step, "at": round(at, 6), "event": OBSERVED, "seen": item.as_json()}
    return None


def rounds(step: int, selected: Rounds, at: float) -> Iterator[Record]:
    """Yield a line for each round of a step's selection; prompts are identified by their admission numbers."""
    for number, each in enumerate(selected, 1):
        yield {"step": step, "at": round(at, 6), "event": "round", "round": number, **asdict(each)}


def endings(step: int, report: StepReport, at: float) -> Iterator[Record]:
    """Yield a line for each rollout that a step trained or dropped."""
    for rollout in report.trained:
        yield _line(step, at, "trained", rollout, version=report.version)
    for drop in report.dropped:
        yield _line(step, at, "dropped", drop.rollout, reason=redacted(drop.reason))


def drain(step: int, at: float) -> Record:
    """Return the line that says after which step the run drained."""
    return {"step": step, "at": round(at, 6), "event": DRAINED}


def story(path: Path, rollout: int) -> list[Record]:
    """Return the lines of one rollout in the journal at ``path``, in order, as they are there."""
    found = (record for record in read(path) if record.get("rollout") == rollout)
    return [{**record, "step": cast("int", record["step"]) + 1} for record in found]


@dataclass(frozen=True)
class Replay:
    """The decisions that a resumed run repeats, from its journal.

    Attributes:
        observations: of the controllers, by step.
        drains: the steps after which the run drained because a signal had ended it.
    """

    observations: Mapping[int, Observation] = field(default_factory=dict)
    drains: frozenset[int] = frozenset()


def read_replay(path: Path, first: int = 0) -> Replay:
    """Return what a resumed run repeats by the journal at ``path``, with the observations from step ``first`` on."""
    observed: dict[int, Observation] = {}
    drained: set[int] = set()
    for record in read(path):
        if record.get("event") == OBSERVED and (each := _observation(record.get("seen"))) is not None:
            observed[each.step] = each
        elif record.get("event") == DRAINED:
            last = cast("int", record["step"])
            drained.add(last)
            observed = {step: each for step, each in observed.items() if step <= last}  # later ones are made anew
    return Replay({step: each for step, each in observed.items() if step >= first}, frozenset(drained))


def observations(path: Path, first: int = 0) -> Mapping[int, Observation]:
    """Return the observations of the steps from ``first`` on, by step, from the journal at ``path``."""
    return read_replay(path, first).observations


def _observation(seen: object) -> Observation | None:
    """Return a journalled observation; ``None`` for a damaged one."""
    try:
        return Observation.from_json(cast("dict[str, Json]", seen))
    except (KeyError, TypeError, ValueError, AttributeError):
        return None


def _line(step: int, at: float, event: str, rollout: int, **facts: object) -> Record:
    return {"step": step, "at": round(at, 6), "event": event, "rollout": rollout, **facts}
