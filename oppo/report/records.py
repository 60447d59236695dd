"""Records: files of one JSON object a line, each with its ``step``; read, and rewound to a checkpoint.

In a file step n is the one after which n steps are made: 1 is the first, and an evaluation before it has step 0.
Records in memory have the index of a step, from 0 on. So have files of earlier versions: they are known by their first
line, and rewritten when their run is resumed.

A kill may tear the last line, which is dropped. Any other line that is no record was damaged later: it is left out,
kept in a file of its own and reported. The lines after it stay.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeAlias, cast

from oppo.durable import opened, put

Record: TypeAlias = dict[str, object]
Damaged: TypeAlias = Callable[[int, bytes], None]
"""Called with the number, from 1, of each line that is no record, and the line."""

EVALUATIONS = "eval.jsonl"
"""One object an evaluation, the first of step 0; only where a run is evaluated."""

OBSERVED = "observed"
"""The event of a record that holds the controllers' observation of a step."""

DRAINED = "drained"
"""The event of a record of the last step that was in flight when a signal ended the run: the next began after it."""

_SHOWN = 5  # numbers in a message


def read(path: Path, damaged: Damaged = lambda number, line: None) -> Iterator[Record]:
    """Yield the records of a file, each with the index of its step; none without the file."""
    if not path.exists():
        return
    first = 0 if path.name == EVALUATIONS else 1
    before: int | None = None
    with path.open("rb") as lines:  # a torn line may end within a character
        for number, line in enumerate(lines, 1):
            record = _record(line)
            if record is not None:
                step = cast("int", record["step"])
                before = (1 if step >= first else 0) if before is None else before
                yield {**record, "step": step - before}
            elif line.endswith(b"\n"):
                damaged(number, line)


def line_of(record: Mapping[str, object]) -> str:
    """Return the line of a record with the index of its step."""
    counted = {**record, "step": cast("int", record["step"]) + 1}
    return json.dumps(counted, ensure_ascii=False, allow_nan=False) + "\n"


def _record(line: bytes) -> Record | None:
    try:
        record: object = json.loads(line, parse_constant=_refused)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def _refused(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")


def rewind(path: Path, steps: int) -> list[str]:
    """Keep in a file the records of the first ``steps`` steps, and what steers later ones; the file may be large.

    A resumed run repeats steps with the same observations, so that its controllers decide as before, and drains after
    the same steps, however often the run is killed. Damaged lines go to ``<name>.damaged``.

    Returns:
        A sentence if lines were damaged.

    Raises:
        OSError: the file cannot be read or written; it stays as it was.
    """
    numbers: list[int] = []
    aside = path.with_name(f"{path.name}.damaged")

    def keep_aside(number: int, line: bytes) -> None:
        numbers.append(number)
        with opened(aside, "a") as file:
            file.buffer.write(line)

    kept = _kept(read(path, keep_aside), steps)
    put(path, map(line_of, kept))
    return [f"{path}: left out as damaged: {_listed('line', numbers)}; see {aside.name}"] if numbers else []


def _kept(records: Iterator[Record], steps: int) -> Iterator[Record]:
    later: list[Record] = []  # of the few steps that are repeated
    for record in records:
        step = cast("int", record["step"])
        if record.get("event") == DRAINED:  # what came after it before is another run's
            later = [each for each in later if cast("int", each["step"]) <= step]
        if step < steps:
            yield record
        elif record.get("event") in {OBSERVED, DRAINED}:
            later.append(record)
    yield from later


def gaps(path: Path, steps: int) -> list[str]:
    """Return a sentence if a file lacks records of some of the first ``steps`` steps."""
    found = {record["step"] for record in read(path)}
    missing = [step + 1 for step in range(steps) if step not in found]
    return [f"{path}: no record of {_listed('step', missing)}, nor of what was trained then"] if missing else []


def _listed(noun: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    rest = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{noun}s {', '.join(map(str, numbers[:_SHOWN]))}{rest}"
