"""Taking a record file back to a checkpoint: what a run wrote after it will be written again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

from oppo.report.journal import OBSERVED, Record, read
from oppo.report.put import put


def rewind(path: Path, steps: int) -> list[Record]:
    """Return the records of the first ``steps`` steps, and leave in the file no others, but for observations.

    Those outlive the steps they are of: the controllers are told them again when these steps are made again, whatever
    else is measured then, and however often the run is killed on the way. A line that a kill has torn is dropped with
    what follows it; a file that is not there holds no record.

    Args:
        path: a file of JSON objects, one a line, each with its ``step``.
        steps: how many steps are kept.

    Raises:
        OSError: the file cannot be read or written; it then is as it was.
    """
    kept: list[Record] = []
    observed: list[Record] = []
    for record in read(path):
        if cast("int", record["step"]) < steps:
            kept.append(record)
        elif record.get("event") == OBSERVED:
            observed.append(record)
    lines = (json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in kept + observed)
    put(path, "".join(lines))
    return kept
