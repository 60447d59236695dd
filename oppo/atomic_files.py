"""Files that outlive kills: writes are atomic, and temporary files are removed.

::

    name             the directory
    .name.partial    its replacement while it is written; the next writer beside it deletes a leftover
    .name.before     the old directory, while the replacement is renamed
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Final, Literal, TextIO

from oppo.errors import OppoError

_ATTEMPTS: Final = 3


def opened(path: Path, mode: Literal["r", "a", "a+", "w", "x"]) -> TextIO:
    """Open a text file in a directory that others may write: never what a link there leads to, nor a pipe."""
    return open(path, mode, encoding="utf-8", opener=_no_follow)


def content(path: Path, *, linked: bool = False, most: int = 2**28) -> bytes:
    """Return the content of a plain file of at most ``most`` bytes: a pipe or a device may have no end."""
    with open(path, "rb", opener=_plain if linked else _no_follow) as file:
        if (size := os.fstat(file.fileno()).st_size) > most:
            raise OSError(errno.EFBIG, f"{path.name} has {size} bytes, and at most {most} are read", str(path))
        return file.read(most)


def read_text(path: Path, *, linked: bool = False) -> str:
    return content(path, linked=linked).decode("utf-8")


def is_plain(path: Path) -> bool:
    return not path.is_symlink() and path.is_file()


def remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _no_follow(path: str, flags: int) -> int:
    if Path(path).is_symlink():
        raise _no_plain_file(path)
    return _plain(path, flags | os.O_NOFOLLOW)


def _plain(path: str, flags: int) -> int:
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise _no_plain_file(path)
    return descriptor


def _no_plain_file(path: str) -> OSError:
    return OSError(errno.EINVAL, f"{Path(path).name} is no plain file", path)


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def nearby(name: str | Path) -> str:
    """Return a path as seen from the working directory if it leads into that; any other name as it is."""
    path, here = Path(name), Path.cwd()
    return str(path.relative_to(here)) if path != here and path.is_relative_to(here) else str(name)


def put(path: Path, parts: Iterable[str]) -> None:
    """Replace the file at ``path`` by a text; the parts may be read from the old file meanwhile."""
    aside = path.with_name(f".{path.name}.partial")
    try:
        remove(aside)  # of a process that was killed
        with opened(aside, "x") as file:
            file.writelines(parts)
        sync(aside)
        aside.replace(path)
        sync(path.parent)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise


def make(directory: Path) -> None:
    made = [parent for parent in (directory, *directory.parents) if not parent.exists()]
    directory.mkdir(parents=True, exist_ok=True)
    for parent in made:
        sync(parent.parent)


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yield a directory to write into; when the context ends without an error, it replaces ``path``.

    After an error ``path`` is as it was and the new directory is deleted, unless it was complete and only the renaming
    failed.
    """
    make(path.parent)
    sweep(path.parent)
    aside = path.with_name(f".{path.name}.partial")
    try:
        aside.mkdir()
        yield aside
        for file in (*aside.rglob("*"), aside):
            sync(file)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError):
            raise OSError(f"{error.strerror or error}".replace(str(aside), str(path))) from error
        raise
    _rename(aside, path)


@contextmanager
def writing(path: Path) -> Iterator[None]:
    try:
        yield
    except (OppoError, MemoryError):
        raise
    except Exception as error:
        raise OSError(f"{path}: {getattr(error, 'strerror', None) or error}") from error


def sweep(directory: Path) -> None:
    for before in directory.glob(".*.before"):
        path = before.with_name(before.name.removeprefix(".").removesuffix(".before"))
        if path.exists():
            shutil.rmtree(before, ignore_errors=True)
        else:
            before.rename(path)
    for leftover in directory.glob(".*.partial"):
        with suppress(OSError):
            remove(leftover)


def _rename(aside: Path, path: Path) -> None:
    # Only then is the directory that was there deleted; where renaming fails, ``path`` is as it was.
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


@contextmanager
def temporary(purpose: str, parent: Path | None = None, *, kept: Callable[[], bool] = lambda: False) -> Iterator[Path]:
    """Yield a new temporary directory of this user, and remove it; those that ended processes left go first.

    ``kept`` is asked at its end: whether it is left as long as this process lives, and until another wants one.
    """
    machine = f"{os.uname().nodename}-" if parent else ""  # another one that has the directory may not see its lock
    prefix = f"oppo-{purpose}-{machine}{os.getuid()}-"
    for left in Path(parent or tempfile.gettempdir()).glob(f"{prefix}*"):
        with suppress(OSError), ExitStack() as stack:
            stack.callback(os.close, _locked(left))
            shutil.rmtree(left)
    with ExitStack() as stack:
        for _ in range(_ATTEMPTS):  # another process may take a new one for one that was left
            folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
            stack.callback(shutil.rmtree, folder, ignore_errors=True)
            with suppress(OSError):
                stack.callback(os.close, _locked(folder))
                break
        try:
            yield folder
        finally:
            if kept():
                stack.pop_all()


def _locked(folder: Path) -> int:
    # The system gives the lock up when the process ends, however it does.
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(held).st_uid != os.getuid():
            raise PermissionError(errno.EACCES, "of another user", str(folder))
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder.stat()
    except OSError:
        os.close(held)
        raise
    return held
