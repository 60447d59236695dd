"""Taking a record file back to a checkpoint: what a run wrote after it will be written again."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import cast

from oppo.report.journal import OBSERVED, Record, read
from oppo.report.put import put_parts


def rewind(path: Path, steps: int) -> None:
    """Leave in a file the records of the first ``steps`` steps, and no others but observations; it may be large.

    Those outlive the steps they are of: the controllers are told them again when these steps are made again, whatever
    else is measured then, and however often the run is killed on the way. A line that a kill has torn is dropped with
    what follows it; a file that is not there holds no record.

    Args:
        path: a file of JSON objects, one a line, each with its ``step``.
        steps: how many steps are kept.

    Raises:
        OSError: the file cannot be read or written; it then is as it was.
    """
    put_parts(path, (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in _kept(path, steps)))


def _kept(path: Path, steps: int) -> Iterator[Record]:
    observed: list[Record] = []  # of the steps that are made again, which are few
    for record in read(path):
        if cast("int", record["step"]) < steps:
            yield record
        elif record.get("event") == OBSERVED:
            observed.append(record)
    yield from observed
