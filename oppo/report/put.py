"""Writing a file so that it is there complete or not at all, after a loss of power too."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from oppo.durable import sync


def put(path: Path, text: str) -> None:
    """Write a whole file, or leave what was there.

    Raises:
        OSError: it could not be written.
    """
    put_parts(path, (text,))


def put_parts(path: Path, texts: Iterable[str]) -> None:
    """Do the same with a text that comes in parts, and may be made from what was there.

    Raises:
        OSError: it could not be written.
    """
    aside = path.with_name(f".{path.name}.partial")
    try:
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(texts)
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
