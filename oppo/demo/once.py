"""Builds directories once, complete or not at all, with random numbers of their own."""

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

from oppo.hf.devices import use_cores
from oppo.report.records import Lock, is_locked

COMPLETE: Final = "COMPLETE"
"""The file that is written last; a directory without it is not used."""

_BUILDING: Final = ".building-"


def made_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Return ``target``; if it is missing, ``build`` makes it under another name first, and it is renamed.

    Of two processes that build it at once, both return a complete directory.
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
    """Yield a new folder in ``parent``, deleted with the context; folders of killed processes are deleted first.

    Each folder is locked by its process. The parent is locked until a new folder is, so that no other process takes it
    for that of a killed one.
    """
    descriptor = os.open(parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        for leftover in parent.glob(f"{_BUILDING}*"):
            with suppress(OSError):  # another user's
                if not is_locked(leftover):
                    shutil.rmtree(leftover)
        aside = Path(tempfile.mkdtemp(prefix=_BUILDING, dir=parent))
        lock = Lock(aside)
    finally:
        os.close(descriptor)
    try:
        yield aside
    finally:
        lock.release()
        shutil.rmtree(aside, ignore_errors=True)


def _install(built: Path, target: Path) -> None:
    """Rename a finished directory to ``target``, unless a complete one is there; an incomplete one is deleted."""
    if target.exists() and not (target / COMPLETE).exists():
        shutil.rmtree(target)
    try:
        built.rename(target)
    except OSError:
        if not (target / COMPLETE).exists():
            raise


@contextmanager
def alone(seed: int) -> Iterator[None]:
    """Seed torch, give it one thread and hide transformers' progress bars while the context is open."""
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
