"""Writing a file so that it is there complete or not at all."""

from __future__ import annotations

from pathlib import Path


def put(path: Path, text: str) -> None:
    """Write a whole file, or leave what was there.

    Raises:
        OSError: it could not be written.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.write_text(text, encoding="utf-8")
        aside.replace(path)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
