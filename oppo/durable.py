"""What a kill, or a loss of power, finds on the disk: a directory as a whole or not at all, and names that stay.

::

    name             the directory
    .name.partial    what is being written to take its place; swept by the next who writes beside it
    .name.before     what was there, for the moment in which the one that was written is given its name
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from oppo.errors import OppoError


def sync(path: Path) -> None:
    """Return once a file's content, or a directory's names, are on the disk.

    Raises:
        OSError: the disk has failed.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make(directory: Path) -> None:
    """Have a directory, and those above it, there to stay.

    Raises:
        OSError: it cannot be made.
    """
    made = [each for each in (directory, *directory.parents) if not each.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for each in made:
        sync(each.parent)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a directory to write into; when the context ends well it is at ``path``, in place of what was there.

    When it does not, nothing of it stays, and what was there does. What was written to its end but could not be given
    its name stays too, aside.

    Raises:
        OSError: it could not be written, or given its name.
    """
    make(path.parent)
    sweep(path.parent)
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.mkdir()
        yield aside
        for each in (*aside.rglob("*"), aside):
            sync(each)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(f"{error.strerror or error}".replace(str(aside), str(path))) from error
        raise
    _put(aside, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Have an error of the body say that it was writing ``path``.

    Raises:
        OSError: it could not be written; whatever the body raised, for libraries have errors of their own for full
            disks.
    """
    try:
        yield
    except (OppoError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def sweep(directory: Path) -> None:
    """Delete what killed processes have left half-written in ``directory``; what they had moved away comes back.

    Raises:
        OSError: it cannot come back.
    """
    for before in directory.glob(".*.before"):
        path = before.with_name(before.name.removeprefix(".").removesuffix(".before"))
        if path.exists():
            shutil.rmtree(before, ignore_errors=True)
        else:
            before.rename(path)
    for leftover in directory.glob(".*.partial"):
        shutil.rmtree(leftover, ignore_errors=True)


def _put(aside: Path, path: Path) -> None:
    """Give what was written aside its name; what had it before goes, but only then.

    Raises:
        OSError: one of them cannot be moved; ``path`` is as it was.
    """
    before = path.with_name(f".{path.name}.before")
    try:
        if path.exists():
            path.rename(before)
        aside.rename(path)
    except OSError as error:
        if before.exists():
            before.rename(path)
        raise OSError(f"{error.strerror or error}; all that was written is in {aside}") from error
    sync(path.parent)
    shutil.rmtree(before, ignore_errors=True)
