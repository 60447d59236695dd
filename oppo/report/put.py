"""Writing a file so that it is there complete or not at all, after a loss of power too."""

from __future__ import annotations

from pathlib import Path

from oppo.durable import sync


def put(path: Path, text: str) -> None:
    """Write a whole file, or leave what was there.

    Raises:
        OSError: it could not be written.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
