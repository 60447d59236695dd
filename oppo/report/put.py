"""Writes a file that is there complete or not at all, after a loss of power too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from oppo.durable import opened, sync


def put(path: Path, parts: Iterable[str]) -> None:
    """Replace the file at ``path`` by a text; the parts may be read from the old file meanwhile.

    Raises:
        OSError: it could not be written; the old file stays.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.unlink(missing_ok=True)  # of a process that was killed
        with opened(aside, "x") as file:
            file.writelines(parts)
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
