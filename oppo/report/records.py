"""Records: files of one JSON object a line, each with its ``step``; read, and taken back to a checkpoint.

A kill may tear the last line, which is dropped. Any other line that is no record was damaged later: it is left out and
kept aside, a sentence says so, and what follows it stays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeAlias, cast

from oppo.report.put import put_parts

Record: TypeAlias = dict[str, object]
Damaged: TypeAlias = Callable[[int, bytes], None]
"""Called with the number of a line, from 1, that is no record, and the line."""

OBSERVED = "observed"
"""The event of a record that says what controllers were told of a step."""

_SHOWN = 5  # numbers that a sentence names


def left_out(number: int, line: bytes) -> None:
    """Leave a damaged line out."""
    del number, line


def read(path: Path, damaged: Damaged = left_out) -> Iterator[Record]:
    """Yield the records of a file; none where there is no file."""
    if not path.exists():
        return
    with path.open("rb") as lines:  # a torn line may end within a character
        for number, line in enumerate(lines, 1):
            record = _record(line)
            if record is not None:
                yield record
            elif line.endswith(b"\n"):
                damaged(number, line)


def _record(line: bytes) -> Record | None:
    try:
        record: object = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) and type(record.get("step")) is int else None


def rewind(path: Path, steps: int) -> list[str]:
    """Leave in a file the records of the first ``steps`` steps, and no others but observations; it may be large.

    Those outlive the steps they are of: the controllers are told them again when these steps are made again, whatever
    else is measured then, and however often the run is killed on the way. Damaged lines go to ``<name>.damaged``.

    Args:
        path: a file of records.
        steps: how many steps are kept.

    Returns:
        A sentence if lines were damaged.

    Raises:
        OSError: the file cannot be read or written; it then is as it was.
    """
    numbers: list[int] = []
    aside = path.with_name(f"{path.name}.damaged")

    def keep_aside(number: int, line: bytes) -> None:
        numbers.append(number)
        with aside.open("ab") as file:
            file.write(line)

    kept = _kept(read(path, keep_aside), steps)
    put_parts(path, (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in kept))
    return [f"{path}: left out as damaged: {_listed('line', numbers)}; see {aside.name}"] if numbers else []


def _kept(records: Iterator[Record], steps: int) -> Iterator[Record]:
    observed: list[Record] = []  # of the steps that are made again, which are few
    for record in records:
        if cast("int", record["step"]) < steps:
            yield record
        elif record.get("event") == OBSERVED:
            observed.append(record)
    yield from observed


def gaps(path: Path, steps: int) -> list[str]:
    """Return a sentence if there is no record of some of the first ``steps`` steps in a file."""
    there = {record["step"] for record in read(path)}
    missing = [step for step in range(steps) if step not in there]
    return [f"{path}: no record of {_listed('step', missing)}, nor of what was trained then"] if missing else []


def _listed(noun: str, numbers: Sequence[int]) -> str:
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{noun}s {', '.join(map(str, numbers[:_SHOWN]))}{more}"
