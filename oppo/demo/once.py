"""Things that are made once and kept: a directory that is there whole or not at all, and randomness of one's own."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import torch
from transformers.utils import logging as transformers_logging

from oppo.hf.cpu import use_cores
from oppo.report.lock import Lock, is_locked

COMPLETE: Final = "COMPLETE"
"""The file that is written last: without it a directory is not used."""

_BUILDING: Final = ".building-"


def made_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return ``target``, made by ``build`` if it is not there: aside, then renamed.

    Two processes that build at once both end with a whole one.
    """
    if (target / COMPLETE).exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _aside(target.parent) as aside:
        built = aside / target.name
        built.mkdir()
        build(built)
        (built / COMPLETE).write_text(target.name + "\n", encoding="utf-8")
        _install(built, target)
    return target


@contextmanager
def _aside(parent: Path) -> Iterator[Path]:
    """Make a folder in ``parent`` that lasts as long as the context; those of processes that were killed are deleted.

    A folder is locked while it is somebody's. Between its making and its locking nobody else may look, so that the
    parent is locked meanwhile.
    """
    looking = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(looking, fcntl.LOCK_EX)
        for left in parent.glob(f"{_BUILDING}*"):
            with suppress(OSError):  # another user's
                if not is_locked(left):
                    shutil.rmtree(left)
        aside = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=parent))
        lock = Lock(aside)
    finally:
        os.close(looking)
    try:
        yield aside
    finally:
        lock.release()
        shutil.rmtree(aside, ignore_errors=True)


def _install(built: Path, target: Path) -> None:
    """Move a finished directory to its place; one without its marker gives way, a whole one stays."""
    if target.exists() and not (target / COMPLETE).exists():
        shutil.rmtree(target)
    try:
        built.rename(target)
    except OSError:
        if not (target / COMPLETE).exists():
            raise


@contextmanager
def alone(seed: int) -> Iterator[None]:
    """Seed torch, give it one thread and silence transformers' progress bars, for as long as the context is open."""
    before, bars = torch.get_num_threads(), transformers_logging.is_progress_bar_enabled()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        use_cores(1)
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            use_cores(before)
            if bars:
                transformers_logging.enable_progress_bar()
