"""Taking a record file back to a checkpoint: what a run wrote after it will be written again."""

from __future__ import annotations

import json
from pathlib import Path

from oppo.report.journal import Record
from oppo.report.put import put


def rewind(path: Path, steps: int) -> list[Record]:
    """Return the records of the first ``steps`` steps, and leave no others in the file.

    A line that a kill has torn is dropped with what follows it; a file that is not there holds no record.

    Args:
        path: a file of JSON objects, one a line, each with its ``step``.
        steps: how many steps are kept.

    Raises:
        OSError: the file cannot be read or written; it then is as it was.
    """
    kept: list[Record] = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for line in lines:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if record["step"] < steps:
            kept.append(record)
    put(path, "".join(json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n" for record in kept))
    return kept
